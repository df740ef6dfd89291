"""StatsReporter: statistics of a rank, while steps run and at the end of a run."""

from __future__ import annotations

import os
import time
from dataclasses import asdict

import torch

from labinfer.base.rank_stats import ExpertReads, Slices, WorkerStats
from labinfer.base.tracer import Tracer
from labinfer.comm.pipeline import PipelineCommunicator
from labinfer.comm.spmd.accelerator import hardware_name
from labinfer.comm.spmd.machine import peak_memory, private_memory, total_memory, used_memory
from labinfer.comm.spmd.threads import format_ranges
from labinfer.comm.spmd.topology import Place
from labinfer.functions.expert_offload import ExpertOffload
from labinfer.observe.energy_meter import EnergyMeter
from labinfer.worker.worker import Worker


class StatsReporter:
    """Statistics of this rank since the last report.

    Args:
        pipeline: links between stages; None if there is one stage.
        energy: counters of energy that this rank reads.
        offload: cache of the experts that are kept in a file (``--expert-offload``); None if all experts are in memory.
    """

    def __init__(
        self,
        place: Place,
        worker: Worker,
        pipeline: PipelineCommunicator | None,
        *,
        device: torch.device,
        weight_bytes_read: int,
        recorder: Tracer,
        energy: EnergyMeter,
        offload: ExpertOffload | None = None,
    ):
        self._place, self._worker, self._pipeline, self._device = place, worker, pipeline, device
        self._weight_bytes_read, self._recorder, self._offload = weight_bytes_read, recorder, offload
        self._energy, self._memory_total = energy, total_memory(device)
        self._accelerator = "" if device.type == "cpu" else f"{device} ({hardware_name(device)})"

    def report(self, num_slices: int) -> WorkerStats:
        """Statistics of this rank while steps run, with the trace's ``Slices`` since the last call. Another thread may call it.

        Args:
            num_slices: maximum number of ``Slices`` entries to record until the next call; 0 for none.
        """
        slices = self._recorder.take()
        self._recorder.capacity = num_slices
        return self._read(slices)

    def take(self) -> WorkerStats:
        """Statistics of this rank at the end of a run; resets the counters."""
        stats = self._read(self._recorder.take())
        self.reset()
        return stats

    @property
    def energy_missing(self) -> list[str]:
        """Why energy counters of this rank are not measured; empty if all are."""
        return list(self._energy.missing)

    def begin(self) -> None:
        """Start counting the energy of a run: a host uses energy between runs, too."""
        self._energy.begin()

    def reset(self) -> None:
        """Reset the worker's statistics to 0."""
        self._energy.begin()
        self._worker.reset_counters()
        if self._offload is not None:
            self._offload.reset_stats()

    def _read(self, slices: Slices | None) -> WorkerStats:
        return WorkerStats(
            rank=self._place.rank,
            stage=self._place.stage,
            tp_rank=self._place.tp_rank,
            num_steps=self._worker.num_steps,
            busy_time=self._worker.busy_time,
            layer_time=self._worker.layer_time if self._device.type == "cpu" else self._worker.busy_time,
            peak_memory=peak_memory(self._device),
            private_memory=private_memory(),
            weight_bytes_read=self._weight_bytes_read,
            num_threads=torch.get_num_threads(),
            cpus=format_ranges(os.sched_getaffinity(0)),
            accelerator=self._accelerator,
            slices=slices,
            bytes_sent=dict(self._pipeline.bytes_sent) if self._pipeline else {},
            expert_tokens=self._worker.expert_tokens(),
            expert_reads=ExpertReads(**asdict(self._offload.stats)) if self._offload is not None else None,
            when=time.monotonic(),
            memory_total=self._memory_total,
            memory_used=used_memory(self._device, self._memory_total),
            waits={name: seconds for name, seconds in self._worker.waits.items() if seconds},
            energy=self._energy.read(),
            energy_missing=self.energy_missing,
        )
