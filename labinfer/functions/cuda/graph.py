"""Graphs of a card's kernels: a step is hundreds of short ones, and starting them one by one takes longer than all of them."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable

import torch

from labinfer.base.errors import first_line
from labinfer.functions.graph import NotReplayable

logger = logging.getLogger(__name__)

SYNCHRONIZES = "called a synchronizing CUDA operation"
"""Part of torch's warning about an operation that waits for the GPU, in ``torch.cuda.set_sync_debug_mode("warn")``."""


class CudaGraph:
    """Kernels that a card starts by itself, one after another.

    Args:
        out: what they compute.
    """

    num_bytes = program_bytes = 0  # all share the memory of what is computed in between, and the driver has the kernels

    def __init__(self, graph: torch.cuda.CUDAGraph, out: torch.Tensor):
        self._graph, self._out = graph, out

    def replay(self) -> None:
        self._graph.replay()


class CudaCapture:
    """Capture of a step's kernels, see ``functions.graph.Capture``.

    Args:
        device: the card.
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None
        """Graph that keeps the pool: it ends with the last of its graphs, and some are not kept."""
        self._is_broken = False

    def __call__(
        self, run: Callable[[], torch.Tensor], dry_run: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, CudaGraph | None]:
        if self._is_broken:
            return run(), None
        out, waits = _watch(run)
        if waits:
            logger.debug("a step is run in Python: something in it waits for the card")
            return out, None
        # Graphs use the same memory for what they compute in between, so that a result has to be elsewhere.
        kept = out.clone()
        try:
            if self._first is None:
                self._first = self._record(lambda: torch.zeros(1, device=self._device))
            graph = self._record(lambda: kept.copy_(dry_run()))
        except NotReplayable as error:
            logger.debug("a step is run in Python: %s", error)
            return out, None
        except Exception as error:  # noqa: BLE001 - whatever it is, the step itself has been run
            self._is_broken = True
            logger.warning("steps are not captured on this card, which makes them slower: %s", first_line(error))
            return out, None
        return kept, CudaGraph(graph, kept)

    def _record(self, calls: Callable[[], torch.Tensor]) -> torch.cuda.CUDAGraph:
        """Go through a step without carrying it out; its graph."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Other threads may copy and allocate meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                calls()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph


def _watch(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Run something; its result, and whether the host waited for the card in it: a captured step cannot."""
    before, thread, waits = torch.cuda.get_sync_debug_mode(), threading.get_ident(), []

    def hear(message: Warning | str, *others: object) -> None:
        if SYNCHRONIZES in str(message) and threading.get_ident() == thread:  # other threads may wait
            waits.append(message)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        torch.cuda.set_sync_debug_mode("warn")  # which itself warns of being young
        try:
            out = run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return out, bool(waits)
