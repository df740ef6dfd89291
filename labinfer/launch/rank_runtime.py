"""RankRuntime: the objects with which a rank runs its part of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from labinfer.base.rank_stats import StepTimes
from labinfer.comm.control import ControlChannel
from labinfer.comm.pipeline import PipelineCommunicator
from labinfer.comm.spmd.topology import Place
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.launch.draft_model import LoadedDraftModel
from labinfer.launch.draft_rank import RemoteDraftChannel
from labinfer.launch.layout.kv_capacity import KVCapacity
from labinfer.launch.layout.layout import Layout
from labinfer.observe.recorder import Recorder
from labinfer.worker.stats_reporter import StatsReporter
from labinfer.worker.worker import Worker


@dataclass(kw_only=True)
class RankRuntime:
    """Objects with which a rank runs its part of a model: worker, communicators, statistics."""

    layout: Layout
    place: Place
    directory: Path
    """Directory of the checkpoint."""
    kernels: list[str]
    """Names of the chosen kernels, and versions of their providers."""
    channel: ControlChannel
    tp: TensorParallelCommunicator
    pipeline: PipelineCommunicator | None
    """Pipeline communicator; None with one stage."""
    worker: Worker
    stats: StatsReporter
    recorder: Recorder
    capacity: KVCapacity
    step_times: StepTimes | None
    """Measured seconds of steps; None if no scheduling decision depends on them."""
    draft_model: LoadedDraftModel | None = None
    """Draft model on rank 0; None without one."""
    drafts: RemoteDraftChannel | None = None
    """Rank 0's channel to the draft rank; None without one."""

    def close(self) -> None:
        """Free the weights and KV caches."""
        if self.drafts is not None:
            self.drafts.close()
        self.worker.close()
        if self.draft_model is not None:
            self.draft_model.close()
