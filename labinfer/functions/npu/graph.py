"""NPU graphs: captured decode steps, whose attention is given the context lengths of each replay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager
from types import ModuleType

import torch

from labinfer.base.errors import first_line
from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.graph import NotReplayable
from labinfer.functions.npu.attention import NpuAttention, StepLengths
from labinfer.functions.waits import watch_waits

logger = logging.getLogger(__name__)


class NpuGraph:
    """A captured step: all its operators are launched by one call.

    Args:
        capture: the capture that records the calls.
        run: makes the calls. The calls read tensors at the addresses of the captured step; later steps write their inputs there.
        out: output tensor of the calls.
        batch: batch of the captured step; None if the calls read no lengths.
    """

    num_bytes = program_bytes = 0  # graphs share a memory pool, and the driver stores the operators

    def __init__(
        self, capture: NpuCapture, run: Callable[[], torch.Tensor], out: torch.Tensor, batch: AttentionBatch | None
    ):
        self._capture, self._run, self._out = capture, run, out
        self._record(batch)

    def _record(self, batch: AttentionBatch | None) -> None:
        lengths = None if batch is None else StepLengths(batch.context_lens, is_recorded=True)
        graph = self._capture.record(lambda: self._out.copy_(self._run()), lengths)
        self._graph, self._lengths = graph, lengths  # after the capture: the lengths belong to the new graph

    def replay(self, batch: AttentionBatch | None = None) -> None:
        """Run the captured calls for ``batch``. Calls whose contexts became too long for their block tables are captured anew; if
        that fails, they run without a graph."""
        if batch is not None and self._lengths is not None:
            if not self._lengths.fits(batch.context_lens) and not self._can_record(batch):
                with self._capture.attending(StepLengths(batch.context_lens)):
                    self._out.copy_(self._run())
                return
            updates = [{"actual_seq_lengths_kv": run.key_lengths(batch.context_lens)} for run in self._lengths.runs]
            if updates:
                self._graph.update(cpu_update_input=updates)
        self._graph.replay()

    def _can_record(self, batch: AttentionBatch) -> bool:
        """Try to capture the calls for ``batch``. Returns False if that fails, and then keeps the earlier graph."""
        if self._capture.is_disabled:
            return False
        try:
            self._record(batch)
        except NotReplayable:  # several calls for one step, as sequences share too many blocks
            return False
        except Exception as error:  # noqa: BLE001 - whatever the error is, the step can run without a graph
            self._capture.disable(error)
            return False
        return True


class NpuCapture:
    """Capture of a step's operators, see ``functions.graph.Capture``.

    Args:
        npu: torch's module of the device, ``torch_npu.npu``.
        attention: the attention function of the captured steps.
        device: device on which steps are captured.
    """

    def __init__(self, npu: ModuleType, attention: NpuAttention, device: torch.device):
        self._npu, self._attention, self._device = npu, attention, device
        self._stream, self._pool = npu.Stream(device), npu.graph_pool_handle()
        self._first: object | None = None
        """First captured graph: it keeps the memory pool of all graphs alive, which is freed with the last graph."""
        self.is_disabled = False
        """Whether a capture has failed, after which steps are no longer captured."""

    def __call__(
        self,
        run: Callable[[], torch.Tensor],
        dry_run: Callable[[], torch.Tensor],
        batch: AttentionBatch | None = None,
    ) -> tuple[torch.Tensor, NpuGraph | None]:
        if self.is_disabled:
            return run(), None
        out, waits = watch_waits(run, self._npu)
        if waits:
            logger.debug("steps run without graph capture: an operation synchronizes with the NPU")
            return out, None
        kept = out.clone()  # graphs share memory for intermediate results
        try:
            if self._first is None:
                self._first = self.record(lambda: torch.zeros(1, device=self._device), None)
            return kept, NpuGraph(self, dry_run, kept, batch)
        except NotReplayable as error:
            logger.debug("steps run without graph capture: %s", error)
        except Exception as error:  # noqa: BLE001 - whatever the error is, the step itself has been run
            self.disable(error)
        return out, None

    def disable(self, error: Exception) -> None:
        """Stop capturing steps because a capture has failed with ``error``. Graphs that exist are still replayed."""
        self.is_disabled = True
        logger.warning("NPU graphs are disabled on this device, so steps are slower: %s", first_line(error))

    def record(self, calls: Callable[[], torch.Tensor], lengths: StepLengths | None) -> object:
        """Capture ``calls`` into an ``NPUGraph`` without running them.

        Args:
            lengths: context lengths of the step; also notes the calls that take context lengths.

        Raises:
            NotReplayable: a call depends on values that a replay cannot change.
        """
        graph = self._npu.NPUGraph()
        options = {"auto_dispatch_capture": True, "capture_error_mode": "thread_local"}  # other threads may allocate
        with (
            self.attending(lengths),
            self._npu.graph(graph, pool=self._pool, stream=self._stream, **options),
        ):
            calls()
        return graph

    @contextmanager
    def attending(self, lengths: StepLengths | None):
        """Context manager in which attention takes the context lengths from ``lengths`` for a batch whose ``context_lens`` is a
        ``HostReadGuard`` (a dry run), or raises ``NotReplayable`` if ``lengths`` is None. Otherwise it reads ``context_lens``."""
        self._attention.lengths = lengths
        try:
            yield
        finally:
            self._attention.lengths = None
