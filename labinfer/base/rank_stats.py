"""Measurements of ranks: StepTimes, made before the first request; Slices and WorkerStats, made while requests run."""

from __future__ import annotations

import msgspec


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Step times in seconds of the slowest rank of each stage, measured before the first request."""

    sizes: list[int]
    """Batch sizes of the timed steps, in decoding sequences; ascending."""
    by_stage: list[list[float]]
    """Seconds of a step, indexed by stage, then by the index in ``sizes``."""
    hop: float = 0.0
    """Seconds that activations take between two stages: from the end of a step on one stage to its beginning on the next; 0 with one stage."""
    swapped_block: float = 0.0
    """Seconds to swap a KV block out to host memory and back; 0 if there is no host pool."""
    swapped_window_block: float = 0.0
    """Seconds to swap a window block out and back; 0 if sliding-window layers have no blocks of their own."""
    swapped_state: float = 0.0
    """Seconds to swap the recurrent state of a sequence out to host memory and back; 0 without recurrent states."""
    alone: list[list[float]] = []
    """Times as in ``by_stage``, but measured while all other stages are idle; ``by_stage`` is measured while all are
    busy. An idle stage leaves memory bandwidth, and possibly cores, to the busy one. Empty if the times do not differ."""

    draft_rows: list[int] = []
    """Numbers of tokens of one sequence in the timed steps that verify a draft; ascending from 1."""
    drafts_by_stage: list[list[float]] = []
    """Seconds of a step that verifies a draft, indexed by stage, then by the index in ``draft_rows``."""

    def drafted(self, stage: int, size: float, count: float) -> float:
        """Seconds that ``count`` drafted tokens add to a stage's step of ``size`` decoding sequences.

        With several sequences, at least the seconds that ``count`` more sequences would add.
        """
        of_one = of_others = 0.0
        if has_drafts := len(self.draft_rows) > 1:
            times = self.drafts_by_stage[stage]
            of_one = max(0.0, _interpolate(self.draft_rows, times, 1 + count) - times[0])
        if size > 1 or not has_drafts:
            of_others = self.at(stage, size + count) - self.at(stage, size)
        return max(of_one, of_others)

    def at(self, stage: int, size: float, alone: bool = False) -> float:
        """Seconds of a stage's step with ``size`` decoding sequences, interpolated linearly between the measured times.

        Args:
            alone: whether all other stages are idle during the step.
        """
        sizes, times = self.sizes, (self.alone if alone and self.alone else self.by_stage)[stage]
        return _interpolate(sizes, times, size)

    @property
    def per_token(self) -> float:
        """Seconds per token of a long prompt, in the busiest stage."""
        return max(times[-1] for times in self.by_stage) / self.sizes[-1]


def _interpolate(sizes: list[int], times: list[float], size: float) -> float:
    """Interpolate ``times``, measured at ``sizes``, linearly at ``size``; the slope is at least 0."""
    if len(sizes) == 1 or size <= sizes[0]:
        return times[0]
    right = next((index for index in range(1, len(sizes)) if size <= sizes[index]), len(sizes) - 1)
    slope = (times[right] - times[right - 1]) / (sizes[right] - sizes[right - 1])
    return times[right - 1] + max(0.0, slope) * (size - sizes[right - 1])


class Slices(msgspec.Struct, frozen=True, array_like=True):
    """Recorded slices of a rank's time (named intervals of a trace), encoded; see ``observe/recorder.py``."""

    names: list[str]
    numbers: bytes
    """Six 64-bit integers per slice: index into ``names``, begin and end in nanoseconds, and the step's id (-1 outside
    a step), number of tokens, and number of decode tokens."""
    clock: int
    """Nanoseconds to add to a time of the slices' clock to get Unix time."""
    num_dropped: int
    """Slices that were dropped because the recorder was full."""


class ExpertReads(msgspec.Struct, frozen=True, kw_only=True):
    """Expert accesses of a rank with expert offload, where all experts are in a file and some of them also in memory."""

    hits: int
    """Accesses to experts that were in memory."""
    misses: int
    bytes_read: int
    stall_time: float
    """Seconds in which computation waited for an expert to be read."""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a rank's work for one model since the beginning of a run. Times in seconds, memory in bytes."""

    rank: int
    stage: int
    tp_rank: int
    num_steps: int
    busy_time: float
    """Time inside the model, including sampling, excluding waits for other stages."""
    layer_time: float = 0.0
    """Part of ``busy_time`` inside the layers. On accelerators all of ``busy_time``, as they are not synchronized between layers
    and LM head."""
    peak_memory: int
    """Peak resident memory, including pages of mapped files and an accelerator's memory."""
    private_memory: int
    """Resident memory at the end of the run, without pages of mapped files."""
    weight_bytes_read: int
    num_threads: int
    cpus: str
    """CPUs that this rank may run on, in the notation of ``taskset``."""
    accelerator: str = ""
    """Device and product name of the rank's accelerator, such as ``npu:0 (Ascend910B)``; empty on a CPU."""
    slices: Slices | None = None
    """Recorded slices; None if nothing was recorded."""
    bytes_sent: dict[int, int] = {}
    """Bytes of activations and tokens sent, by destination rank."""
    expert_tokens: dict[int, list[int]] = {}
    """Tokens routed to each expert, by layer; reported by the first tensor-parallel rank of a stage."""
    expert_reads: ExpertReads | None = None
    """Expert accesses; None if all experts are in memory."""
    when: float = 0.0
    """Time at which the counters were read, in seconds of the rank's monotonic clock."""
    memory_total: int = 0
    """Total memory of the rank's device: an accelerator's, or its machine's within the container's limit."""
    memory_used: int = 0
    """Used memory of the rank's device: by this rank on an accelerator, by all processes on a machine."""
    waits: dict[str, float] = {}
    """Seconds that this rank waited, by cause: ``plans`` (from rank 0), ``activations`` (from the previous stage), or,
    on rank 0 only, ``tokens`` (from the last stage)."""
    energy: dict[str, float] = {}
    """Joules by name of the energy counter; see ``observe/energy_meter.py``. Empty if this rank reads no counter."""
    energy_missing: list[str] = []
    """Reasons why energy counters of this rank are not read."""
