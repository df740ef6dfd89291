"""StepGraphs: a stage's layers on a batch, which small decode steps run as captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from labinfer.functions.graph import Capture, Graph
from labinfer.layers.input_batch import ModelInputBatch

MAX_SEQUENCES = 4
"""Of a step that is captured: with more of them calls take long enough for Python to keep up, and a graph keeps all its
activations."""
MAX_STEPS = 16


@dataclass(frozen=True)
class CapturedStep:
    """A graph with the memory that it reads from and writes to beside that of the batch."""

    graph: Graph
    hidden_TD: torch.Tensor | None
    out_TD: torch.Tensor


class StepGraphs:
    """Runs the layers. A step of one token for each of a few sequences is captured, and its likes are replayed.

    Steps are alike if their numbers stand in the same places, which those of ``IndexBuffer`` do.

    Args:
        model: this rank's share.
        caches: of its layers.
        capture: None where nothing is captured. It must be able to see all that the model does, see ``functions.graph``.
    """

    def __init__(self, model: nn.Module, caches: Sequence[Any], capture: Capture | None):
        self._model, self._caches, self._capture = model, caches, capture
        self._steps: dict[tuple[int, ...], CapturedStep | None] = {}
        """By ``places``; None for those that cannot be captured."""

    def run(self, batch: ModelInputBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """(T, D) → (T, D); None in on the first stage."""
        lengths = batch.attention.context_lens
        if self._capture is None or not len(lengths) == len(batch.token_ids_T) <= MAX_SEQUENCES:
            return self._model(batch, hidden_TD, self._caches)
        places = batch.places()
        if places not in self._steps:
            return self._capture_step(places, batch, hidden_TD)
        step = self._steps[places]
        if step is None:
            return self._model(batch, hidden_TD, self._caches)
        if hidden_TD is not None:
            step.hidden_TD.copy_(hidden_TD)
        step.graph.replay()
        return step.out_TD.clone()  # what was sent may still be on its way when the next step is run

    def _capture_step(
        self, places: tuple[int, ...], batch: ModelInputBatch, hidden_TD: torch.Tensor | None
    ) -> torch.Tensor:
        own_TD = None if hidden_TD is None else hidden_TD.clone()
        out_TD, graph = self._capture(lambda: self._model(batch, own_TD, self._caches))
        if len(self._steps) == MAX_STEPS:
            self._steps.clear()
        self._steps[places] = None if graph is None else CapturedStep(graph, own_TD, out_TD)
        return out_TD.clone()
