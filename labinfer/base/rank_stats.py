"""Plain data that ranks measure: StepTimes before the first request, Slices and WorkerStats while requests run."""

from __future__ import annotations

import msgspec


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that steps take on the slowest rank of each stage, measured before the first request."""

    sizes: list[int]
    """Decoding sequences of the steps that were timed, ascending."""
    by_stage: list[list[float]]
    """Seconds of a step, for each stage and each of ``sizes``."""
    hop: float = 0.0
    """Seconds from the end of a stage's step to the beginning of the next stage's; 0 with one stage."""
    swapped_block: float = 0.0
    """Seconds to move a KV block to the host pool and back; 0 without a host pool."""
    swapped_window_block: float = 0.0
    """The same for one of the layers with a window; 0 where all blocks are alike."""
    swapped_state: float = 0.0
    """The same for the state of a sequence; 0 where there is none."""
    alone: list[list[float]] = []
    """Seconds of the same steps while all other stages wait, where those of ``by_stage`` are timed with all at work: memory is then
    this stage's alone, and so may be others' cores. Empty where it is no different."""

    draft_rows: list[int] = []
    """Tokens of one sequence in steps that were timed, ascending from 1, where drafted tokens are verified."""
    drafts_by_stage: list[list[float]] = []
    """Seconds of these steps, for each stage."""

    def drafted(self, stage: int, size: float, count: float) -> float:
        """Seconds that a stage's step of ``size`` decoding sequences takes longer for so many drafted tokens.

        With several sequences it is not less than for so many more of these.
        """
        of_one = of_others = 0.0
        if has_drafts := len(self.draft_rows) > 1:
            times = self.drafts_by_stage[stage]
            of_one = max(0.0, _interpolate(self.draft_rows, times, 1 + count) - times[0])
        if size > 1 or not has_drafts:
            of_others = self.at(stage, size + count) - self.at(stage, size)
        return max(of_one, of_others)

    def at(self, stage: int, size: float, alone: bool = False) -> float:
        """Seconds of a stage's step of ``size`` decoding sequences, by straight lines through the measured times.

        Args:
            alone: whether the other stages wait meanwhile.
        """
        sizes, times = self.sizes, (self.alone if alone and self.alone else self.by_stage)[stage]
        return _interpolate(sizes, times, size)

    def describe(self) -> str:
        """One line for the log of a start."""
        text = f"a step of the slowest stage takes {self._slowest(self.by_stage)} decoding sequences"
        text += f" ({self._slowest(self.alone)} while the others wait)" if self.alone else ""
        text += f", a hop {self.hop * 1e3:.2f} ms" if self.hop else ""
        text += f", a swapped KV block {self.swapped_block * 1e3:.2f} ms" if self.swapped_block else ""
        return text + (f", a swapped state {self.swapped_state * 1e3:.2f} ms" if self.swapped_state else "")

    def _slowest(self, times: list[list[float]]) -> str:
        return ", ".join(f"{max(of[i] for of in times) * 1e3:.1f} ms for {size}" for i, size in enumerate(self.sizes))

    @property
    def per_token(self) -> float:
        """Seconds for one token of a long prompt in the busiest stage."""
        return max(times[-1] for times in self.by_stage) / self.sizes[-1]


def _interpolate(sizes: list[int], times: list[float], size: float) -> float:
    """The time of a size, by straight lines that never fall."""
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
    """Nanoseconds to add to ``begin`` and ``end`` for times since 1970."""
    num_dropped: int
    """Slices for which there was no room."""


class ExpertReads(msgspec.Struct, frozen=True, kw_only=True):
    """Experts that steps of a rank needed, where all are in a file and some in memory."""

    hits: int
    """Experts that were in memory."""
    misses: int
    bytes_read: int
    stall_time: float
    """Seconds in which nothing could be computed for want of an expert."""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a rank's work for one model since the beginning of a run. Times in seconds, memory in bytes."""

    rank: int
    stage: int
    tp_rank: int
    num_steps: int
    busy_time: float
    """Time inside the model, sampling included, waiting for other stages excluded."""
    layer_time: float = 0.0
    """Part of it in the layers; all of it on accelerators, which are not waited for behind each part."""
    peak_memory: int
    """Highest resident memory, pages of mapped files and an accelerator's memory included."""
    private_memory: int
    """Resident memory at the end, without pages of mapped files."""
    weight_bytes_read: int
    num_threads: int
    cpus: str
    """The CPUs this rank may run on, as ``taskset`` writes them."""
    slices: Slices | None = None
    """None where nothing was recorded."""
    bytes_sent: dict[int, int] = {}
    """Activations and tokens, by the rank they were sent to."""
    expert_tokens: dict[int, list[int]] = {}
    """Tokens that each expert of a layer was given, by layer; on the first tensor-parallel rank of a stage."""
    expert_reads: ExpertReads | None = None
    """None where all experts are in memory."""
    when: float = 0.0
    """Seconds of the rank's ``time.monotonic`` at which the counters were read."""
    memory_total: int = 0
    """All that its device has; see ``spmd.machine.total_memory``."""
    memory_used: int = 0
    """The part of it that is in use; see ``spmd.machine.used_memory``."""
    waits: dict[str, float] = {}
    """Seconds that this rank waited, by what for: ``plans`` of rank 0, ``activations`` of the stage before, or, on rank 0,
    ``tokens`` of the last stage."""
