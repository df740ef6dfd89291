"""Launches of ``golden_driver.py``: what they are given, and what must come of them."""

from __future__ import annotations

import json

from checkpoints import HYBRIDS, LATENTS, MIXTURES
from golden import BEAM_PROMPTS, BEAMS, PROMPTS, TOLERANCE, golden
from launchers import Finished, command, finish, start

DRIVER = "tests/cluster/golden_driver.py"
SAMPLE_CASES = [("1f1b", 16, "plain"), ("gpipe", 512, "plain"), ("lockstep", 1, "plain")]
NEWEST = ("gemma3", *MIXTURES, *HYBRIDS, *LATENTS)
SCENARIOS = ("hit", "swap", "recompute", "beams")
"""Those of ``golden_driver.py`` but the plain one."""

Case = tuple[str, str, int, str]
"""Checkpoint, pipeline schedule, prefill chunk, scenario."""


def cases_of(kinds, ways) -> list[Case]:
    return [(kind, *way) for kind in kinds for way in ways]


def run_driver(launcher, ranks, layouts, directory, timeout=300, **env: str) -> dict:
    """Results of the cases of each layout, [options, cases] by name."""
    return read_results(finish(start(driver_command(launcher, ranks, layouts, directory), **env), timeout), directory)


def driver_command(launcher, ranks, layouts, directory) -> list[str]:
    return command(launcher, ranks, DRIVER, write_job(layouts, directory), str(directory / "out.json"))


def write_job(layouts, directory) -> str:
    kinds = {case[0] for _, cases in layouts.values() for case in cases}
    job = {
        "prompts": PROMPTS,
        "beam_prompts": BEAM_PROMPTS,
        "beams": BEAMS,
        "checkpoints": {kind: str(golden(kind).directory) for kind in sorted(kinds)},
        "layouts": layouts,
    }
    (directory / "job.json").write_text(json.dumps(job))
    return str(directory / "job.json")


def read_results(done: Finished, directory) -> dict:
    assert done.returncode == 0, done.text
    return json.loads((directory / "out.json").read_text())


def check(results, num_cases, sampled_alone=None) -> None:
    assert len(results) == num_cases
    for case, result in results.items():
        kind, _, _, scenario = case.split("/")
        if scenario == "beams":
            assert result["beams"] == golden(kind).beams, f"{case}: beams differ from Transformers'"
            continue
        assert all(answers == golden(kind).tokens for answers in result["greedy"]), f"{case}: greedy tokens differ"
        assert result["logit_error"] < TOLERANCE, f"{case}: logits are off by {result['logit_error']:.2e}"
        wrong = {key: value for key, value in result.items() if key.startswith("wrong choices") and value}
        assert not wrong, f"{case}: experts differ from Transformers' ({wrong})"
        counts = result["counts"]
        preempted, swapped = counts.get("preemptions", 0) > 0, counts.get("swaps", 0) > 0
        assert (preempted, swapped) == (scenario in ("recompute", "swap"), scenario == "swap"), f"{case}: {counts}"
        assert (counts.get("found", 0) > 0) == (scenario == "hit") or preempted, f"{case}: {counts}"
        if scenario == "plain":
            assert result["sampled"] == sampled_alone[kind], f"{case}: sampled tokens differ from those of one rank"
