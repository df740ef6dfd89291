"""RunReport: counts and times of a run, and the table that is printed at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from labinfer.base.plugins import PLUGINS
from labinfer.base.rank_stats import ExpertReads, WorkerStats
from labinfer.observe.draft_figures import DraftFigures
from labinfer.observe.energy_figures import EnergyFigures
from labinfer.observe.table import format_bytes, format_seconds, format_table, percentile
from labinfer.observe.trace import MODEL_SLICES, WAIT_PREFIX, own_times, read_slices

FRACTIONS = (0.5, 0.9, 0.99)
"""Quantiles of latencies that a report shows, as fractions."""
TIME_HEADER = ("rank", "stage", "tp", "steps", "busy", "bubble", "waits")
RESOURCE_HEADER = ("rank", "threads", "CPUs", "peak memory", "private memory", "weights read")
"""Columns of the report's two tables of ranks: times and resources. (One table with all columns would be wider than a terminal.)"""


@dataclass(kw_only=True)
class RunReport:
    """Counts and times of a run, updated while it runs. Times are in seconds."""

    num_finished: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    generated_tokens: int = 0
    """Number of output tokens of all answers so far, including unfinished answers."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counters of the scheduler: ``preemptions``; ``swaps`` (preemptions by swapping); ``looked_up`` (tokens of
    sequences, counted at each admission); ``found`` (prefix-cache hits among these tokens); and counters of drafts (see
    ``DraftFigures``)."""
    wall_time: float = 0.0
    time_to_first_token: list[float] = field(default_factory=list)
    time_per_output_token: list[float] = field(default_factory=list)
    workers: Sequence[WorkerStats] = ()
    fingerprint: str = ""
    """Digest of all that the answers depend on, as shown in the report; empty if the report does not show it."""

    def bubble(self, worker: WorkerStats) -> float:
        """Fraction of the run's time in which the rank of ``worker`` did not compute (its pipeline bubble)."""
        return max(0.0, 1.0 - worker.busy_time / self.wall_time) if self.wall_time else 0.0

    @property
    def mean_bubble(self) -> float:
        return sum(map(self.bubble, self.workers)) / len(self.workers) if self.workers else 0.0

    @property
    def hit_rate(self) -> float:
        """Fraction of prefix-cache hits among the tokens of admitted sequences."""
        return self.counts["found"] / self.counts["looked_up"] if self.counts["looked_up"] else 0.0

    def expert_tokens(self) -> dict[int, list[int]]:
        """Maps each MoE layer to the number of tokens routed to each of its experts."""
        return {layer: tokens for worker in self.workers for layer, tokens in sorted(worker.expert_tokens.items())}

    def time_shares(self) -> dict[str, float]:
        """Fraction of rank 0's recorded time by name of trace slices, the largest first; empty if nothing was recorded."""
        slices = self.workers[0].slices if self.workers else None
        times = own_times(read_slices(slices)) if slices else Counter()
        return {name: time / times.total() for name, time in times.most_common() if time}

    def energy(self) -> EnergyFigures:
        """Energy of the run, summed over all hosts and accelerators."""
        return EnergyFigures.read(self.workers, self.output_tokens, self.num_finished)

    def as_dict(self) -> dict:
        """The report as values of a JSON object."""
        return {
            "finished": self.num_finished,
            "failed": self.num_failed,
            "wall_s": round(self.wall_time, 4),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "preemptions": self.counts["preemptions"],
            "swaps": self.counts["swaps"],
            "cache_hit_rate": round(self.hit_rate, 4),
            "speculation": DraftFigures.read(self.counts).as_dict() if self.counts["drafts"] else None,
            "time_to_first_token_s": _percentile_dict(self.time_to_first_token),
            "time_per_output_token_s": _percentile_dict(self.time_per_output_token),
            "ranks": [worker.rank for worker in self.workers],
            "busy_s": [round(worker.busy_time, 4) for worker in self.workers],
            "bubble": [round(self.bubble(worker), 4) for worker in self.workers],
            "waits_s": [{name: round(seconds, 4) for name, seconds in worker.waits.items()} for worker in self.workers],
            "time_shares": {name: round(share, 4) for name, share in self.time_shares().items()},
            "peak_memory": [worker.peak_memory for worker in self.workers],
            "private_memory": [worker.private_memory for worker in self.workers],
            "weight_bytes_read": [worker.weight_bytes_read for worker in self.workers],
            "expert_tokens": {str(layer): tokens for layer, tokens in self.expert_tokens().items()},
            "expert_reads": [
                msgspec.structs.asdict(w.expert_reads) for w in self.workers if w.expert_reads is not None
            ],
            "energy": self.energy().as_dict(),
            "threads": [worker.num_threads for worker in self.workers],
            "cpus": [worker.cpus for worker in self.workers],
            "accelerators": [worker.accelerator for worker in self.workers],
            "plugins": PLUGINS.identities(),
        }

    def summary(self) -> str:
        """Summary of the run in one line."""
        first, count = self.time_to_first_token, self.output_tokens
        what = f"{count} token{'s' * (count != 1)} in {format_seconds(self.wall_time)}"
        if count and self.wall_time:
            what += f" ({count / self.wall_time:.1f}/s), TTFT {format_seconds(min(first))}"
        answers = f"{self.num_finished} requests: " if self.num_finished > 1 else ""
        prompts = f"{self.prompt_tokens} prompt token{'s' * (self.prompt_tokens != 1)}"
        return f"{answers}{what}; {prompts}"

    def format(self, max_width: int = 0) -> str:
        """The report as text: counts and times of the run, then a table of times and a table of resources of all ranks. For
        ``max_width`` see ``format_table``."""
        wall = self.wall_time or float("nan")
        rows = [
            ("requests", f"{self.num_finished} finished, {self.num_failed} failed"),
            ("wall time", format_seconds(self.wall_time)),
            ("prompt tokens", f"{self.prompt_tokens} ({self.prompt_tokens / wall:.1f}/s)"),
            ("output tokens", f"{self.output_tokens} ({self.output_tokens / wall:.1f}/s)"),
            ("time to first token", _percentiles(self.time_to_first_token)),
            ("time per output token", _percentiles(self.time_per_output_token)),
        ]
        if self.counts["found"]:
            rows.append(("prefix cache hits", f"{self.counts['found']} tokens ({100 * self.hit_rate:.1f} %)"))
        if self.counts["drafts"] or self.counts["drafter_failures"]:
            rows.append(("drafted tokens", DraftFigures.read(self.counts).describe()))
        if self.counts["preemptions"]:
            rows.append(
                (
                    "preemptions",
                    f"{self.counts['preemptions']}, {self.counts['swaps']} of them swapped (the KV cache was full; raise "
                    "--num-kv-blocks or lower --max-num-seqs)",
                )
            )
        if shares := self.time_shares():
            others = {name: share for name, share in shares.items() if name not in MODEL_SLICES}
            parts = ", ".join(f"{name} {100 * share:.1f} %" for name, share in others.items())
            work = sum(share for name, share in others.items() if not name.startswith(WAIT_PREFIX))
            rows.append(
                ("overhead on rank 0", f"{100 * work:.1f} % of its time outside the model, without waits: {parts}")
            )
        if loads := self.expert_tokens():
            rows.append(("expert load", describe_loads(loads)))
        if reads := [w.expert_reads for w in self.workers if w.expert_reads is not None]:
            rows.append(("expert cache hits", describe_reads(reads)))
        if energy := self.energy().describe():
            rows.append(("energy", energy))
        if names := [f"rank {w.rank} {w.accelerator}" for w in self.workers if w.accelerator]:
            rows.append(("accelerators", ", ".join(names)))
        if dropped := sum(w.slices.num_dropped for w in self.workers if w.slices):
            rows.append(("missing in trace", f"{dropped} slices (the recorder was full)"))
        if self.fingerprint:
            rows.append(("fingerprint", self.fingerprint))
        text = "\n".join(f"{name:<22} {value}" for name, value in rows)
        if not self.workers:
            return text
        times = [
            (
                *(w.rank, w.stage, w.tp_rank, w.num_steps),
                *(f"{100 * share:.1f} %" for share in (1 - self.bubble(w), self.bubble(w))),
                self._describe_waits(w),
            )
            for w in self.workers
        ]
        resources = [
            (
                *(w.rank, w.num_threads, w.cpus),
                *(format_bytes(size) for size in (w.peak_memory, w.private_memory, w.weight_bytes_read)),
            )
            for w in self.workers
        ]
        tables = (format_table(TIME_HEADER, times, max_width), format_table(RESOURCE_HEADER, resources, max_width))
        return "\n\n".join([text, *tables])

    def _describe_waits(self, worker: WorkerStats) -> str:
        """Text that says what a rank waited for, in percent of the run's time, the longest wait first."""
        shares = [(seconds / self.wall_time, name) for name, seconds in worker.waits.items() if self.wall_time]
        shown = [f"{name} {100 * share:.1f} %" for share, name in sorted(shares, reverse=True) if share >= 0.0005]
        return ", ".join(shown) or "-"


def describe_loads(loads: Mapping[int, Sequence[int]]) -> str:
    """One line of text that says how evenly tokens were routed to the experts.

    Args:
        loads: number of tokens routed to each expert, by layer.
    """
    peaks = {layer: max(tokens) * len(tokens) / sum(tokens) for layer, tokens in loads.items() if any(tokens)}
    if not peaks:
        return "no expert was used"
    layer = max(peaks, key=peaks.__getitem__)
    expert, mean = loads[layer].index(max(loads[layer])), sum(peaks.values()) / len(peaks)
    idle, count = sum(tokens.count(0) for tokens in loads.values()), sum(map(len, loads.values()))
    return (
        f"busiest expert per layer: {mean:.1f} times the mean load, up to {peaks[layer]:.1f} times (layer {layer}, "
        f"expert {expert}); {idle} of {count} experts had no tokens"
    )


def describe_reads(ranks: Sequence[ExpertReads]) -> str:
    """Text with the hit rate of the expert cache, and the time that its misses took."""
    hits, misses = sum(reads.hits for reads in ranks), sum(reads.misses for reads in ranks)
    share = f"{100 * hits / (hits + misses):.1f} % of {hits + misses}" if hits + misses else "no expert was used"
    size, stall = format_bytes(sum(reads.bytes_read for reads in ranks)), max(reads.stall_time for reads in ranks)
    return f"{share}; {size} read from disk, the slowest rank waited {format_seconds(stall)}"


def _percentile_dict(values: Sequence[float]) -> dict[str, float]:
    return (
        {f"p{round(100 * fraction)}": round(percentile(values, fraction), 6) for fraction in FRACTIONS}
        if values
        else {}
    )


def _percentiles(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return ", ".join(
        f"p{round(100 * fraction)} {format_seconds(percentile(values, fraction))}" for fraction in FRACTIONS
    )
