"""Every family on make-believe cards: stages on one card, on two, beside the CPU, and on hosts with different plugins give
Transformers' greedy tokens, logits and beams, and the tokens that the CPU draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import FAMILIES, KINDS
from golden_launches import NEWEST, SAMPLE_CASES, SCENARIOS, Case, cases_of, check, run_driver
from launchers import LAUNCHERS, matrix
from many_streams import ask_all
from serving import serving

import labinfer
from labinfer.launch.measure.probe_layout import model_name
from labinfer.models.registry import load_config

DEMO = Path(labinfer.__file__).parent / "assets" / "demo"
SWITCHES = ("no-float64", "late-copies")
PP, TP = "pipeline_parallel_size", "tensor_parallel_size"
LAYOUTS = {
    "npu, then cpu": ("npu", 2, {PP: 2, "device": ["npu", "cpu"]}),
    "cpu, then npu": ("npu", 2, {PP: 2, "device": ["cpu", "npu"]}),
    "two cards": ("npu", 2, {PP: 2, "device": ["npu"]}),
    "tp 2": ("npu", 2, {TP: 2, "device": ["npu"]}),
    "tp 2 on each of two stages, one on the CPU": ("npu", 4, {TP: 2, PP: 2, "device": ["npu", "cpu"]}),
    "npu, then a host without": ("npu,", 2, {PP: 2, "device": ["npu", "cpu"]}),
    "a host without, then npu": (",npu", 2, {PP: 2, "device": ["cpu", "npu"]}),
    "npu beside musa": ("npu,musa", 2, {PP: 2, "device": ["npu", "musa"]}),
    "npu, musa and a host without": ("npu,musa,", 3, {PP: 3, "device": ["npu", "musa", "cpu"]}),
    "a name that nobody knows": ("sdaa", 2, {TP: 2, "device": ["sdaa"]}),
}
"""Name of each rank's cards, ranks, options."""
ON_CARDS = ("-tp", "2", "--device", "npu")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> dict:
    """What the CPU draws, by checkpoint."""
    cases = cases_of((*KINDS, *FAMILIES), SAMPLE_CASES[:1])
    results = run_driver("single", 1, {"cpu": [{}, cases]}, tmp_path_factory.mktemp("cpu"), timeout=900)["cpu"]
    return {case.split("/")[0]: result["sampled"] for case, result in results.items()}


def cases_for(name: str, launcher: str) -> list[Case]:
    """Every other family, and some of the newest in a scenario: launchers and layouts take turns."""
    turn = list(LAYOUTS).index(name) + LAUNCHERS.index(launcher)
    scenarios = [(kind, "1f1b", 16, SCENARIOS[(turn + i) % 4]) for i, kind in enumerate(NEWEST[turn % 3 :: 3])]
    return [*cases_of((*KINDS, *FAMILIES)[turn % 2 :: 2], SAMPLE_CASES[:1]), *scenarios]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name, launcher, drawn, fake_device, tmp_path):
    cards, num_ranks, options = LAYOUTS[name]
    cases = cases_for(name, launcher)
    env = fake_device(cards, *SWITCHES)
    results = run_driver(launcher, num_ranks, {name: [options, cases]}, tmp_path, timeout=1200, **env)
    check(results[name], len(cases), drawn)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_streams_and_a_change_of_the_layout(launcher, fake_device):
    """Greedy, drawn, guided and others at once, on two cards, then on one."""
    with serving("--dtype", "float32", launcher=launcher, ranks=2) as server:
        expected = ask_all(server, 100)
    with serving(
        "--dtype", "float32", *ON_CARDS, launcher=launcher, ranks=2, **fake_device("npu", *SWITCHES)
    ) as server:
        assert ask_all(server, 100) == expected
        status, answer = server.post("/v1/cluster/layout", {TP: [1, 1], "layers": [2, 4]})
        assert status == 200 and answer["changed"], answer
        assert ask_all(server, 100) == expected


def plan_of(stages: dict[str, int]) -> dict:
    """Body that asks for a plan of the demo model: machine → layers of its stage."""
    rounding = {"tp_size": 1, "dtype": "float32", "quantization": "none"}
    described = [{"machine": machine, "layers": layers} | rounding for machine, layers in stages.items()]
    return {"plan": {"model": model_name(load_config(DEMO)), "stages": described}}


@pytest.mark.parametrize(("launcher",), matrix(("mpirun",), over=[()]))
def test_plan_of_a_node_with_a_card_and_a_cpu_rank_replaces_a_layout(launcher, fake_device):
    """Streams go on with the same tokens while layers move between the ranks, which keep their devices."""
    env = fake_device("npu", *SWITCHES) | {"LABINFER_NODE_NAME": "a"}
    flags = ("--dtype", "float32", "--device", "npu,cpu", "-pp", "2")
    with serving(*flags, launcher=launcher, ranks=2, **env) as server:
        expected = ask_all(server, 100)
        for stages, ranks in (
            ({"a/npu": 5, "a/cpu": 1}, [("npu:0", 5), ("cpu", 1)]),
            ({"a/npu": 6}, [("npu:0", 6)]),
        ):
            status, answer = server.post("/v1/cluster/layout", plan_of(stages))
            assert status == 200 and answer["changed"], answer
            assert [(rank["device"], rank["num_layers"]) for rank in answer["ranks"]] == ranks
            assert ask_all(server, 100) == expected
        status, answer = server.post("/v1/cluster/layout", plan_of({"a/npu": 5, "a/musa": 1}))
        assert status == 400 and "a layout change keeps the device of each rank" in answer["error"]["message"], answer
