"""StepGraphs: a part of a stage's step, which is captured where a step is small, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from labinfer.functions.graph import Capture, Graph
from labinfer.layers.input_batch import ModelInputBatch

MAX_SEQUENCES = 4
"""Sequences of a step that is captured, at most: with more, calls take long enough for Python to keep up, and a graph keeps all
its activations."""
MAX_ROWS = 8
"""Rows of such a step, where sequences run drafted tokens along with their own."""
MAX_STEPS = 16
"""Graphs that are kept, those that were used last."""

StepPart = Callable[[ModelInputBatch, torch.Tensor | None], torch.Tensor]
"""The layers, or the head, on a batch and hidden states."""


@dataclass(frozen=True)
class CapturedStep:
    """A graph with the memory that it reads from and writes to beside that of the batch."""

    graph: Graph
    hidden_TD: torch.Tensor | None
    out: torch.Tensor


class StepGraphs:
    """Runs a part of each step. A step of one token for each of a few sequences, or of as many drafted ones for each, is captured,
    and its likes are replayed.

    Steps are alike if their numbers stand in the same places, which those of ``IndexBuffer`` do. What a step gives holds until
    the next one.

    Args:
        capture: None where nothing is captured. It must be able to see all that the part does, see ``functions.graph``.
    """

    def __init__(self, part: StepPart, capture: Capture | None):
        self._part, self._capture = part, capture
        self._steps: dict[tuple[int, ...], CapturedStep | None] = {}
        """By ``places``, those that were used last behind the others; None for those that cannot be captured."""

    def __call__(self, batch: ModelInputBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        if self._capture is None or not _is_small(batch):
            return self._part(batch, hidden_TD)
        places = batch.places
        if places not in self._steps:
            return self._capture_step(places, batch, hidden_TD)
        step = self._steps[places] = self._steps.pop(places)
        if step is None:
            return self._part(batch, hidden_TD)
        if hidden_TD is not None:
            step.hidden_TD.copy_(hidden_TD)
        step.graph.replay()
        return step.out

    def _capture_step(
        self, places: tuple[int, ...], batch: ModelInputBatch, hidden_TD: torch.Tensor | None
    ) -> torch.Tensor:
        own_TD = None if hidden_TD is None else hidden_TD.clone()
        out, graph = self._capture(lambda: self._part(batch, own_TD))
        if len(self._steps) == MAX_STEPS:
            del self._steps[next(iter(self._steps))]
        self._steps[places] = None if graph is None else CapturedStep(graph, own_TD, out)
        return out


def _is_small(batch: ModelInputBatch) -> bool:
    """Whether a step has few rows, as many for each sequence: which functions run on a sequence may depend on how many it has."""
    num_sequences, num_rows = len(batch.attention.context_lens), len(batch.token_ids_T)
    if not 0 < num_sequences <= MAX_SEQUENCES or num_rows > MAX_ROWS:
        return False
    if num_rows == num_sequences:
        return True
    row_ptr = batch.attention.row_ptr
    size = row_ptr[1]
    return len(batch.sample_rows_B) == num_rows and row_ptr == list(range(0, num_rows + 1, size))
