"""Every layout under every launcher gives Transformers' greedy tokens, logits, experts and beams, and the same sampled tokens."""

from __future__ import annotations

import time
from functools import cache

import pytest
from checkpoints import FAMILIES, FURTHER, HYBRIDS, KINDS, LATENTS, MIXTURES, SHARED_CACHES
from golden import TOLERANCE, golden, make_goldens
from golden_launches import (
    NEWEST,
    SAMPLE_CASES,
    SCENARIOS,
    Case,
    cases_of,
    check,
    driver_command,
    read_results,
    run_driver,
)
from launchers import BIN, LAUNCHERS, finish, free_port, matrix, start

SCHEDULES = ("1f1b", "gpipe", "lockstep")
CHUNKS = (1, 16, 512)
ALL_CASES = [(schedule, chunk, "plain") for schedule in SCHEDULES for chunk in CHUNKS]
SAMPLE_KINDS = ("qwen2-tied", "llama-untied")
SAMPLE_FAMILIES = tuple(kind for kind in FAMILIES if kind not in FURTHER)[::2]
"""Families that run on one rank and on one other layout; all of them do in the whole matrix."""
WINDOWS = "qwen2-windows"

LAYOUTS = {
    "1 rank": (1, {}),
    "tp 2": (2, {"tensor_parallel_size": 2}),
    "pp 2": (2, {"pipeline_parallel_size": 2}),
    "pp 2, layers 3,1": (2, {"layers": [3, 1]}),
    "tp 3": (3, {"tensor_parallel_size": 3}),
    "tp 3, whole experts": (3, {"tensor_parallel_size": 3, "experts": "whole"}),
    "tp 2,1": (3, {"tensor_parallel_size": [2, 1], "experts": "whole"}),
    "tp 1,2": (3, {"tensor_parallel_size": [1, 2]}),
    "tp 2 x pp 2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "experts": ["columns", "whole"]}),
    "pp 4": (4, {"pipeline_parallel_size": 4}),
}


SHARING = {
    "tp 2, shared": (2, {"tensor_parallel_size": 2}, [(SHARED_CACHES, "1f1b", 16, "hit")]),
    "pp 2, shared": (2, {"pipeline_parallel_size": 2}, [(SHARED_CACHES, "gpipe", 1, "plain")]),
    "tp 3, shared": (3, {"tensor_parallel_size": 3}, [(SHARED_CACHES, "lockstep", 512, "plain")]),
    "tp 1,2, shared": (3, {"tensor_parallel_size": [1, 2]}, [(SHARED_CACHES, "1f1b", 16, "recompute")]),
    "pp 3, shared": (3, {"pipeline_parallel_size": 3}, [(SHARED_CACHES, "1f1b", 16, "plain")]),
}
"""Ranks, options and cases; where stages begin is chosen: the layouts above may part layers that share a cache."""

FEW_SEQUENCES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 400}
"""So few that windows take fewer blocks than contexts."""
MORE_SEQUENCES = FEW_SEQUENCES | {"max_num_seqs": 8, "max_num_batched_tokens": 100}
WINDOWED = {
    f"{layout}, {name}": (LAYOUTS[layout][0], LAYOUTS[layout][1] | options, cases)
    for layout in ("tp 2 x pp 2", "pp 4")
    for name, options, cases in (
        ("few", FEW_SEQUENCES, [(WINDOWS, "1f1b", 16, scenario) for scenario in ("recompute", "swap")]),
        ("more", MORE_SEQUENCES, [("gemma3", "1f1b", 16, "hit")]),
    )
}
"""Models without experts: small steps are captured, and of those nobody notes which experts were chosen."""


def sample_cases(layout: str, launcher: str) -> list[Case]:
    """A dense model, some of ``SAMPLE_FAMILIES``, so that each runs on one layout, and one of the newest in a scenario.

    What differs between layouts takes turns: pipeline schedules with their chunks, models, scenarios.
    """
    turn = list(LAYOUTS).index(layout)
    dense = SAMPLE_KINDS[(turn + LAUNCHERS.index(launcher)) % 2], *SAMPLE_CASES[(turn + 1) % len(SAMPLE_CASES)]
    scenario = NEWEST[turn % len(NEWEST)], "1f1b", CHUNKS[turn % 3], SCENARIOS[turn % 4]
    return [dense, *cases_of(SAMPLE_FAMILIES[turn :: len(LAYOUTS)], [SAMPLE_CASES[turn % len(SAMPLE_CASES)]]), scenario]


ALL = cases_of(KINDS, ALL_CASES) + cases_of(FAMILIES, SAMPLE_CASES)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """One rank under plain Python: a sample of the matrix."""
    make_goldens((*KINDS, *SAMPLE_FAMILIES, *NEWEST, SHARED_CACHES, WINDOWS))
    cases = cases_of(KINDS, SAMPLE_CASES) + cases_of(SAMPLE_FAMILIES, SAMPLE_CASES[:1])
    return run_driver("single", 1, {"alone": [{}, cases]}, tmp_path_factory.mktemp("alone"))["alone"]


@pytest.fixture(scope="module")
def whole_alone(tmp_path_factory) -> dict:
    """One rank under plain Python: all of the matrix."""
    return run_driver("single", 1, {"alone": [{}, ALL]}, tmp_path_factory.mktemp("alone"), timeout=900)["alone"]


def drawn(alone: dict) -> dict:
    """What one rank draws, by checkpoint."""
    schedule, chunk, scenario = SAMPLE_CASES[0]
    return {
        kind: result["sampled"]
        for kind in KINDS + FAMILIES
        if (result := alone.get(f"{kind}/{schedule}/{chunk}/{scenario}"))
    }


@pytest.fixture(scope="module")
def launched(alone, tmp_path_factory):
    """``launched(launcher, num_ranks)``: results of all that this file asks of as many ranks, by layout: one launch."""

    @cache
    def launch(launcher: str, num_ranks: int) -> dict[str, dict]:
        layouts = {
            name: [options, sample_cases(name, launcher)]
            for name, (size, options) in LAYOUTS.items()
            if size == num_ranks
        }
        more = (SHARING | WINDOWED).items()
        layouts |= {name: [options, cases] for name, (size, options, cases) in more if size == num_ranks}
        return run_driver(launcher, num_ranks, layouts, tmp_path_factory.mktemp("launch"))

    return launch


def sample_of(layouts: dict[str, tuple]) -> list[tuple[str, str]]:
    """A launcher for each layout, with its name; one rank is that of plain Python, below."""
    return [("mpirun" if size == 3 else "torchrun", name) for name, (size, *_) in layouts.items() if size > 1]


@pytest.mark.parametrize(("launcher", "name"), matrix(*sample_of(LAYOUTS), over=[(name,) for name in LAYOUTS]))
def test_sample_of_the_matrix(launcher, name, launched, alone):
    check(launched(launcher, LAYOUTS[name][0])[name], len(sample_cases(name, launcher)), drawn(alone))


@pytest.mark.parametrize(("launcher", "name"), matrix(*sample_of(SHARING), over=[(name,) for name in SHARING]))
def test_shared_caches_and_layer_inputs(launcher, name, launched):
    (result,) = launched(launcher, SHARING[name][0])[name].values()
    assert all(answers == golden(SHARED_CACHES).tokens for answers in result["greedy"])
    assert result["logit_error"] < TOLERANCE, f"logits are off by {result['logit_error']:.2e}"


@pytest.mark.parametrize(("launcher", "name"), matrix(*sample_of(WINDOWED), over=[(name,) for name in WINDOWED]))
def test_stages_agree_on_blocks_of_windowed_layers(launcher, name, launched):
    """Stages of one layer have either windowed layers or others."""
    num_ranks, _, cases = WINDOWED[name]
    results = launched(launcher, num_ranks)[name]
    check(results, len(cases))
    assert all(result["num_window_blocks"] > 0 for result in results.values())


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_whole_matrix(name, launcher, whole_alone, tmp_path):
    num_ranks, layout = LAYOUTS[name]
    results = run_driver(launcher, num_ranks, {name: [layout, ALL]}, tmp_path, timeout=900)
    check(results[name], len(ALL), drawn(whole_alone))


def test_plain_python_is_one_rank(alone):
    check(alone, len(KINDS) * len(SAMPLE_CASES) + len(SAMPLE_FAMILIES), drawn(alone))


@pytest.mark.slow
def test_plain_python_is_one_rank_in_the_whole_matrix(whole_alone):
    check(whole_alone, len(ALL), drawn(whole_alone))


SCENARIO_LAYOUTS = [
    ("1 rank", "columns"),
    ("pp 2", "columns"),
    *((name, cut) for name in ("tp 2", "tp 3", "tp 2,1", "tp 2 x pp 2") for cut in ("columns", "whole")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cut"), SCENARIO_LAYOUTS)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kinds", [MIXTURES, HYBRIDS, LATENTS], ids=["mixtures", "hybrids", "latents"])
def test_newest_families_in_every_scenario(kinds, chunk, name, cut, tmp_path):
    """Found in the cache, preempted in both ways, and with beams; the launchers take turns."""
    num_ranks, layout = LAYOUTS[name]
    number = len(name) + CHUNKS.index(chunk) + len(kinds)
    launcher = "single" if num_ranks == 1 else LAUNCHERS[number % 2]
    cases = cases_of(kinds, [("1f1b", chunk, scenario) for scenario in SCENARIOS])
    check(run_driver(launcher, num_ranks, {name: [layout | {"experts": cut}, cases]}, tmp_path)[name], len(cases))


@pytest.mark.slow
def test_two_torchrun_agents_of_one_rank_each(alone, tmp_path):
    port, cases = free_port(), cases_of(KINDS, SAMPLE_CASES)
    arguments = driver_command("single", 1, {"pp 2": [{"pipeline_parallel_size": 2}, cases]}, tmp_path)[1:]
    begin = time.monotonic()
    agents = [
        start(
            [
                str(BIN / "torchrun"),
                "--nnodes=2",
                f"--node-rank={node}",
                "--nproc-per-node=1",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
                *arguments,
            ]
        )  # fmt: skip
        for node in (0, 1)
    ]
    done = [finish(agent, 120, begin) for agent in agents]
    assert done[1].returncode == 0, done[1].text
    check(read_results(done[0], tmp_path)["pp 2"], len(cases), drawn(alone))
