"""StepGraphs: captures a part of decode-only steps as graphs, and replays them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from labinfer.functions.graph import SHARED_BYTES, Capture, Graph, for_dry_run
from labinfer.functions.provider import Provider
from labinfer.models.layers.input_batch import ModelInputBatch
from labinfer.worker.model_runner import FEW_ROWS, Around, StepPart, plain_steps

MAX_SEQUENCES = 128
"""Maximum number of sequences of a captured step."""
KEPT_BYTES = {"layers": 64 << 20, "head": 16 << 20}
"""Maximum memory of the captured steps of each part; the head's includes logits. Intermediate results are in memory
that all graphs share."""
CAPTURED_BYTES = SHARED_BYTES + sum(KEPT_BYTES.values())
"""Maximum memory of all captured steps of a ``ModelRunner``."""


def find_capture(providers: Iterable[Provider], tp_size: int) -> Capture | None:
    """The first capture that a provider offers for steps of a stage of ``tp_size`` ranks; None if none does."""
    able = (provider for provider in providers if provider.device is not None and provider.device.captures(tp_size))
    return next(filter(None, (provider.capture() for provider in able)), None)


def capture_steps(capture: Capture | None) -> Around:
    """Make the ``around`` of a ``ModelRunner`` that captures its steps; with None no step is captured."""
    return plain_steps if capture is None else lambda part, name: StepGraphs(part, capture, KEPT_BYTES[name])


@dataclass(frozen=True)
class CapturedStep:
    """A captured graph with its buffers for activations; its other inputs are the tensors of the batch."""

    graph: Graph
    hidden_TD: torch.Tensor | None
    out: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.graph.program_bytes + self.data_bytes

    @property
    def data_bytes(self) -> int:
        """Bytes that grow with the number of rows: result, input and kept activations."""
        return self.graph.num_bytes + self.out.nbytes + (0 if self.hidden_TD is None else self.hidden_TD.nbytes)


class StepGraphs:
    """Runs a part of each step, as a captured graph if there is one.

    A step of one token for each sequence is captured when it first occurs, and a step of a few tokens of one sequence
    when it occurs a second time. A graph is replayed for steps with equal ``ModelInputBatch.graph_key`` (shapes and
    tensor addresses), which ``IndexBuffer`` keeps stable. The output is valid until the next step.

    Args:
        part: the layers or the head.
        capture: captures the calls of a part; None to capture nothing. It must see all that the part does, see
            ``functions.graph``.
        kept_bytes: maximum memory of all graphs. A step of n rows is captured only if graphs of 1, 2, … n rows all fit:
            otherwise graphs would evict each other again and again.
    """

    def __init__(self, part: StepPart, capture: Capture | None, kept_bytes: int):
        self._part, self._capture, self._kept_bytes = part, capture, kept_bytes
        self._row_bytes, self._program_bytes = 0.0, 0  # largest bytes of a graph so far: per row, and fixed
        self._most_sequences = MAX_SEQUENCES
        """Maximum number of sequences of a step to capture. A capture that fails lowers it to half of the step's sequences."""
        self._seen: set[tuple[int, ...]] = set()  # keys of steps with several rows of one sequence, seen once
        self._steps: dict[tuple[int, ...], CapturedStep | None] = {}
        """Captured steps by ``graph_key``, least recently used first; None for a step that cannot be captured."""

    def __call__(self, batch: ModelInputBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        num_sequences, num_rows = len(batch.attention.context_lens), len(batch.token_ids_T)
        is_chunk = num_sequences == 1 < num_rows <= FEW_ROWS and batch.output_rows is None
        only_decodes = is_chunk or num_sequences == num_rows <= MAX_SEQUENCES
        if self._capture is None or not (only_decodes and self._has_room(num_rows)):
            return self._part(batch, hidden_TD)
        key = batch.graph_key
        if key not in self._steps:
            is_tried = key in self._seen if is_chunk else num_sequences <= self._most_sequences
            if is_tried:
                return self._capture_step(key, batch, hidden_TD)
            if is_chunk:
                self._seen.add(key)
            return self._part(batch, hidden_TD)
        step = self._steps[key] = self._steps.pop(key)
        if step is None:
            return self._part(batch, hidden_TD)
        if hidden_TD is not None:
            step.hidden_TD.copy_(hidden_TD)
        step.graph.replay(batch.attention)
        return step.out

    def _capture_step(
        self, key: tuple[int, ...], batch: ModelInputBatch, hidden_TD: torch.Tensor | None
    ) -> torch.Tensor:
        own_TD = None if hidden_TD is None else hidden_TD.clone()
        out, graph = self._capture(
            lambda: self._part(batch, own_TD), lambda: self._part(_for_dry_run(batch), own_TD), batch.attention
        )
        step = self._steps[key] = None if graph is None else CapturedStep(graph, own_TD, out)
        num_rows, num_sequences = len(batch.token_ids_T), len(batch.attention.context_lens)
        if step is None:
            if num_rows == num_sequences:
                self._most_sequences = num_sequences // 2
            return out
        self._row_bytes = max(self._row_bytes, step.data_bytes / num_rows)
        self._program_bytes = max(self._program_bytes, graph.program_bytes)
        if not self._has_room(num_rows):
            del self._steps[key]
        while self.num_bytes > self._kept_bytes:  # evict the least recently used
            del self._steps[next(iter(self._steps))]
            self._seen.clear()
        return out

    def _has_room(self, num_rows: int) -> bool:
        rows_of_all = num_rows * (num_rows + 1) // 2
        return num_rows * self._program_bytes + rows_of_all * self._row_bytes <= self._kept_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all graphs that are kept now."""
        return sum(step.num_bytes for step in self._steps.values() if step is not None)


def _for_dry_run(batch: ModelInputBatch) -> ModelInputBatch:
    """Copy of a batch whose lists are ``HostReadGuard`` objects, which raise if they are read."""
    windowed = batch.windowed
    if windowed is not None:
        windowed = replace(windowed, attention=for_dry_run(windowed.attention))
    return replace(batch, attention=for_dry_run(batch.attention), windowed=windowed)
