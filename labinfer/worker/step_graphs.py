"""StepGraphs: a part of a stage's step, which is captured where a step is small, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from labinfer.functions.graph import Capture, Graph
from labinfer.layers.input_batch import ModelInputBatch

MAX_SEQUENCES = 4
"""Sequences of a step that is captured, at most: with more, calls take long enough for Python to keep up."""
MAX_ROWS = 17
"""Rows of a step that is captured, at most, where they are of one sequence: a token with drafts to be verified."""
KEPT_ROWS = 192
"""Rows of all captured steps together, at most: a graph keeps its activations, or logits."""

StepPart = Callable[[ModelInputBatch, torch.Tensor | None], torch.Tensor]
"""The layers, or the head, on a batch and hidden states."""


@dataclass(frozen=True)
class CapturedStep:
    """A graph with the memory that it reads from and writes to beside that of the batch."""

    graph: Graph
    hidden_TD: torch.Tensor | None
    out: torch.Tensor


class StepGraphs:
    """Runs a part of each step. A step of one token for each of a few sequences is captured, and its likes are replayed; so is one
    of a few tokens of one sequence, when the second one like it comes.

    Steps are alike if their numbers stand in the same places, which those of ``IndexBuffer`` do. What a step gives holds until
    the next one.

    Args:
        capture: None where nothing is captured. It must be able to see all that the part does, see ``functions.graph``.
    """

    def __init__(self, part: StepPart, capture: Capture | None):
        self._part, self._capture = part, capture
        self._seen: set[tuple[int, ...]] = set()  # places of steps with several rows of a sequence
        self._steps: dict[tuple[int, ...], CapturedStep | None] = {}
        """By ``places``; None for those that cannot be captured."""

    def __call__(self, batch: ModelInputBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        num_sequences, num_rows = len(batch.attention.context_lens), len(batch.token_ids_T)
        is_chunk = num_sequences == 1 < num_rows <= MAX_ROWS and batch.output_rows is None
        if self._capture is None or not (is_chunk or num_sequences == num_rows <= MAX_SEQUENCES):
            return self._part(batch, hidden_TD)
        places = batch.places
        if places not in self._steps:
            if is_chunk and places not in self._seen:
                self._seen.add(places)
                return self._part(batch, hidden_TD)
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
        self._steps[places] = None if graph is None else CapturedStep(graph, own_TD, out)
        while sum(num_rows for _, num_rows, *_ in self._steps) > KEPT_ROWS:
            del self._steps[next(iter(self._steps))]  # the one that was not used for the longest time
            self._seen.clear()
        return out
