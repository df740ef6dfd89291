"""Measurements of ranks: StepTimes before the first request, Slices and WorkerStats while requests run."""

from __future__ import annotations

import msgspec


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that steps take on the slowest rank of each stage, measured before the first request."""

    sizes: list[int]
    """Numbers of decoding sequences in the timed steps, ascending."""
    by_stage: list[list[float]]
    """Seconds of a step, for each stage and each of ``sizes``."""
    hop: float = 0.0
    """Seconds from the end of a stage's step to the beginning of the next stage's; 0 with one stage."""
    swapped_block: float = 0.0
    """Seconds to swap a KV block out to the host pool and back; 0 without a host pool."""
    swapped_window_block: float = 0.0
    """Seconds to swap a window block out and back; 0 without separate blocks of sliding-window layers."""
    swapped_state: float = 0.0
    """Seconds to swap the recurrent state of a sequence out and back; 0 without states."""
    alone: list[list[float]] = []
    """Times as in ``by_stage``, but measured while all other stages are idle; those of ``by_stage`` are measured while
    all are busy. An idle stage leaves memory bandwidth, and possibly cores, to the others. Empty if there is no
    difference."""

    draft_rows: list[int] = []
    """Numbers of tokens in timed verification steps of one sequence, ascending from 1."""
    drafts_by_stage: list[list[float]] = []
    """Seconds of a verification step, for each stage and each of ``draft_rows``."""

    def drafted(self, stage: int, size: float, count: float) -> float:
        """Additional seconds of a stage's step of ``size`` decoding sequences for ``count`` drafted tokens.

        With several sequences, at least the additional seconds for ``count`` more sequences.
        """
        of_one = of_others = 0.0
        if has_drafts := len(self.draft_rows) > 1:
            times = self.drafts_by_stage[stage]
            of_one = max(0.0, _interpolate(self.draft_rows, times, 1 + count) - times[0])
        if size > 1 or not has_drafts:
            of_others = self.at(stage, size + count) - self.at(stage, size)
        return max(of_one, of_others)

    def at(self, stage: int, size: float, alone: bool = False) -> float:
        """Seconds of a stage's step of ``size`` decoding sequences, by linear interpolation of the measured times.

        Args:
            alone: whether the other stages are idle meanwhile.
        """
        sizes, times = self.sizes, (self.alone if alone and self.alone else self.by_stage)[stage]
        return _interpolate(sizes, times, size)

    def describe(self) -> str:
        """Describe the times in one line, for the startup log."""
        text = f"step time of the slowest stage: {self._slowest(self.by_stage)} decoding sequences"
        text += f" ({self._slowest(self.alone)} while the others are idle)" if self.alone else ""
        text += f", stage-to-stage transfer {self.hop * 1e3:.2f} ms" if self.hop else ""
        text += f", swapping a KV block {self.swapped_block * 1e3:.2f} ms" if self.swapped_block else ""
        return text + (f", swapping a recurrent state {self.swapped_state * 1e3:.2f} ms" if self.swapped_state else "")

    def _slowest(self, times: list[list[float]]) -> str:
        return ", ".join(f"{max(of[i] for of in times) * 1e3:.1f} ms for {size}" for i, size in enumerate(self.sizes))

    @property
    def per_token(self) -> float:
        """Seconds for one token of a long prompt in the busiest stage."""
        return max(times[-1] for times in self.by_stage) / self.sizes[-1]


def _interpolate(sizes: list[int], times: list[float], size: float) -> float:
    """Interpolate the time of ``size`` linearly, with slopes of at least 0."""
    if len(sizes) == 1 or size <= sizes[0]:
        return times[0]
    right = next((index for index in range(1, len(sizes)) if size <= sizes[index]), len(sizes) - 1)
    slope = (times[right] - times[right - 1]) / (sizes[right] - sizes[right - 1])
    return times[right - 1] + max(0.0, slope) * (size - sizes[right - 1])


class Slices(msgspec.Struct, frozen=True, array_like=True):
    """Recorded slices of a rank's time, encoded; see ``observe/recorder.py``."""

    names: list[str]
    numbers: bytes
    """Six 64-bit integers for each slice: index of its name, begin and end in nanoseconds, and its step's id (-1 without a
    step), tokens, and decoding tokens."""
    clock: int
    """Nanoseconds to add to ``begin`` and ``end`` for Unix time."""
    num_dropped: int
    """Slices that were dropped for lack of room."""


class ExpertReads(msgspec.Struct, frozen=True, kw_only=True):
    """Expert accesses of a rank's steps with expert offload: all experts are in a file, some in memory."""

    hits: int
    """Accesses to experts in memory."""
    misses: int
    bytes_read: int
    stall_time: float
    """Seconds in which computation waited for an expert."""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a rank's work for one model since the beginning of a run. Times in seconds, memory in bytes."""

    rank: int
    stage: int
    tp_rank: int
    num_steps: int
    busy_time: float
    """Time in the model, with sampling, without waits for other stages."""
    layer_time: float = 0.0
    """Part of ``busy_time`` in the layers. On accelerators all of it, as they are not synchronized after each part."""
    peak_memory: int
    """Highest resident memory, pages of mapped files and an accelerator's memory included."""
    private_memory: int
    """Resident memory at the end, without pages of mapped files."""
    weight_bytes_read: int
    num_threads: int
    cpus: str
    """CPUs that this rank may run on, in the notation of ``taskset``."""
    slices: Slices | None = None
    """Recorded slices; None if nothing was recorded."""
    bytes_sent: dict[int, int] = {}
    """Bytes of activations and tokens sent, by destination rank."""
    expert_tokens: dict[int, list[int]] = {}
    """Tokens routed to each expert, by layer; on the first tensor-parallel rank of a stage."""
    expert_reads: ExpertReads | None = None
    """Expert accesses; None if all experts are in memory."""
    when: float = 0.0
    """Time at which the counters were read, in seconds of the rank's ``time.monotonic``."""
    memory_total: int = 0
    """Total memory of its device; see ``spmd.machine.total_memory``."""
    memory_used: int = 0
    """Used memory of its device; see ``spmd.machine.used_memory``."""
    waits: dict[str, float] = {}
    """Seconds that this rank waited, by cause: ``plans`` of rank 0, ``activations`` of the previous stage, or, on rank
    0, ``tokens`` of the last stage."""
