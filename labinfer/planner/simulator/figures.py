"""stage_figures and replay_figures: load of the stages in a simulated run, and how closely a replay matches the recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labinfer.observe.report import RunReport
from labinfer.observe.table import format_seconds, format_table
from labinfer.observe.trace import Track, make_tracks
from labinfer.planner.simulator.recorded_times import busy_fraction, step_shapes, working_time
from labinfer.planner.simulator.simulation import Simulation


def stage_figures(simulation: Simulation, report: RunReport) -> tuple[str, dict[str, Any]]:
    """Load of each stage, as a text table and as values for JSON."""
    topology = simulation.topology
    workers = {worker.stage: worker for worker in reversed(report.workers)}
    stages = [
        {
            "stage": stage,
            "host": simulation.hosts[stage] if simulation.hosts else "",
            "layers": list(topology.layers[stage]),
            "tp_size": tp_size,
            "busy": round(1 - report.bubble(workers[stage]), 4),
            "bubble": round(report.bubble(workers[stage]), 4),
        }
        for stage, tp_size in enumerate(topology.tp_sizes)
    ]
    rows = [
        (
            row["stage"],
            row["host"] or "-",
            f"{row['layers'][0]}-{row['layers'][1] - 1}" if simulation.hosts else "-",
            row["tp_size"],
            f"{100 * row['busy']:.1f} %",
            f"{100 * row['bubble']:.1f} %",
        )
        for row in stages
    ]
    estimated = "" if simulation.is_measured else " (with estimated costs)"
    lines = [
        f"whole run including warm-up: {workers[0].num_steps} steps in "
        f"{format_seconds(report.wall_time)}{estimated}; {simulation.spec.num_blocks} KV blocks, "
        f"{report.counts['preemptions']} preemptions, {report.counts['found']} prefix-cache hit tokens",
        format_table(("stage", "host", "layers", "tp", "busy", "bubble"), rows),
    ]
    values = {
        "num_steps": workers[0].num_steps,
        "wall_time": report.wall_time,
        "measured": simulation.is_measured,
        "num_kv_blocks": simulation.spec.num_blocks,
        "preemptions": report.counts["preemptions"],
        "swaps": report.counts["swaps"],
        "cached_tokens": report.counts["found"],
        "stages": stages,
    }
    return "\n\n".join(lines), values


def replay_figures(simulation: Simulation, report: RunReport) -> tuple[str, dict[str, Any]]:
    """Recorded run and replay compared, as text and as values: time from first step to last token, and the bubble of each rank."""
    recorded, simulated = simulation.recorded, make_tracks(report.workers)
    (was, bubbles_were), (seconds, bubbles) = (_time_and_bubbles(tracks) for tracks in (recorded, simulated))
    same = step_shapes(recorded[0]) & step_shapes(simulated[0])
    rows = [("seconds", f"{was:.3f}", f"{seconds:.3f}", f"{100 * (seconds / was - 1):+.2f} %")]
    rows += [
        (
            f"bubble of rank {track.rank}",
            f"{100 * before:.1f} %",
            f"{100 * after:.1f} %",
            f"{100 * (after - before):+.2f} points",
        )
        for track, before, after in zip(recorded, bubbles_were, bubbles, strict=True)
    ]
    text = format_table(("from the first step", "recorded", "replayed", "difference"), rows)
    text += f"\n\n{len(same)} of {report.workers[0].num_steps} steps have the same tokens as recorded"
    values = {
        "replayed_steps": len(same),
        "working_time": seconds,
        "recorded_working_time": was,
        "bubbles": bubbles,
        "recorded_bubbles": bubbles_were,
    }
    return text, values


def _time_and_bubbles(tracks: Sequence[Track]) -> tuple[float, list[float]]:
    begin, end = working_time(tracks)
    return (end - begin) / 1e9, [round(1 - busy_fraction(track, begin, end), 4) for track in tracks]
