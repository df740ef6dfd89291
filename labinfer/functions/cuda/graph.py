"""CUDA graphs: a decode step launches hundreds of short kernels, and launching them one by one takes longer than running them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from labinfer.base.errors import first_line
from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.graph import NotReplayable
from labinfer.functions.waits import watch_waits

logger = logging.getLogger(__name__)


class CudaGraph:
    """A captured step: all its kernels are launched by one call.

    Args:
        out: output tensor of the captured calls.
    """

    num_bytes = program_bytes = (
        0  # graphs share a memory pool for intermediate results, and the driver stores the kernels
    )

    def __init__(self, graph: torch.cuda.CUDAGraph, out: torch.Tensor):
        self._graph, self._out = graph, out

    def replay(self, batch: AttentionBatch | None = None) -> None:
        self._graph.replay()


class CudaCapture:
    """Capture of a step's kernels, see ``functions.graph.Capture``.

    Args:
        device: GPU on which steps are captured.
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None
        """First captured graph: it keeps the memory pool of all graphs alive, which is freed with the last graph."""
        self._is_broken = False

    def __call__(
        self,
        run: Callable[[], torch.Tensor],
        dry_run: Callable[[], torch.Tensor],
        batch: AttentionBatch | None = None,
    ) -> tuple[torch.Tensor, CudaGraph | None]:
        if self._is_broken:
            return run(), None
        out, waits = watch_waits(run, torch.cuda)
        if waits:
            logger.debug("steps run without graph capture: an operation synchronizes with the GPU")
            return out, None
        # Graphs share memory for intermediate results, so the result is copied.
        kept = out.clone()
        try:
            if self._first is None:
                self._first = self._record(lambda: torch.zeros(1, device=self._device))
            graph = self._record(lambda: kept.copy_(dry_run()))
        except NotReplayable as error:
            logger.debug("steps run without graph capture: %s", error)
            return out, None
        except Exception as error:  # noqa: BLE001 - whatever the error is, the step itself has been run
            self._is_broken = True
            logger.warning("CUDA graphs are disabled on this GPU, so steps are slower: %s", first_line(error))
            return out, None
        return kept, CudaGraph(graph, kept)

    def _record(self, calls: Callable[[], torch.Tensor]) -> torch.cuda.CUDAGraph:
        """Capture ``calls`` into a graph without running them."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Other threads may copy and allocate during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                calls()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph
