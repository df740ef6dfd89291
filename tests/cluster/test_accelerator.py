"""An accelerator gives Transformers' greedy tokens, logits and beams, alone and beside a stage on the CPU, and the tokens that the
CPU samples. Where torch has none, the make-believe one does."""

from __future__ import annotations

import pytest
import torch
from checkpoints import FAMILIES, HYBRIDS, KINDS, LATENTS, SHARED_CACHES
from golden_launches import NEWEST, SAMPLE_CASES, SCENARIOS, cases_of, check, run_driver
from launchers import LAUNCH, LAUNCHERS, command, finish, start

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
pytestmark = [] if ACCELERATOR else pytest.mark.slow
DEVICE = ACCELERATOR.type if ACCELERATOR else "npu"

LAYOUTS = {
    "an accelerator, then the CPU": {"pipeline_parallel_size": 2, "device": [DEVICE, "cpu"]},
    "the CPU, then an accelerator": {"pipeline_parallel_size": 2, "device": ["cpu", DEVICE]},
    "two stages": {"pipeline_parallel_size": 2, "device": [DEVICE]},
    "tp 2": {"tensor_parallel_size": 2, "device": [DEVICE]},
}
"""For two ranks, which share an accelerator where there is one."""
FEWER_BITS = (
    "--dtype bfloat16",
    "--dtype float16",
    "--quantization int8",
    "--quantization int4",
    "--kv-cache-dtype int8",
)


@pytest.fixture
def env(request) -> dict[str, str]:
    """What ranks need to have the accelerator."""
    return {} if ACCELERATOR else request.getfixturevalue("fake_device")(DEVICE, "no-float64", "late-copies")


@pytest.mark.parametrize("kind", dict.fromkeys((*KINDS, *FAMILIES, SHARED_CACHES)))
def test_family(kind, tmp_path, env):
    cases = cases_of([kind], SAMPLE_CASES if kind in KINDS else SAMPLE_CASES[:1])
    cases += [(kind, "1f1b", 16, scenario) for scenario in SCENARIOS if kind in NEWEST]
    layouts = {"accelerator": [{"device": [DEVICE]}, cases], "cpu": [{"device": ["cpu"]}, [(kind, *SAMPLE_CASES[0])]]}
    results = run_driver("single", 1, layouts, tmp_path, **env)
    (on_cpu,) = results["cpu"].values()
    check(results["accelerator"], len(cases), {kind: on_cpu["sampled"]})


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name, launcher, tmp_path, env):
    cases = cases_of(("qwen2-tied", "llama-untied", HYBRIDS[0], LATENTS[0]), SAMPLE_CASES[:1])
    layouts = {name: [LAYOUTS[name], cases], "cpu": [LAYOUTS[name] | {"device": ["cpu"]}, cases]}
    results = run_driver(launcher, 2, layouts, tmp_path, **env)
    on_cpu = {case.split("/")[0]: result["sampled"] for case, result in results["cpu"].items()}
    check(results[name], len(cases), on_cpu)


@pytest.mark.parametrize("flags", FEWER_BITS)
def test_demo_says_the_same_with_fewer_bits(flags, env):
    prompts = ["--prompt", "17 + 25 = ?", "--prompt", "What is the capital of France?"]
    answers = {}
    for device in (DEVICE, "cpu"):
        done = finish(start(command("single", 1, LAUNCH, *prompts, *flags.split(), "--device", device), **env), 120)
        assert done.returncode == 0, done.text
        answers[device] = done.stdout
    assert answers[DEVICE] == answers["cpu"]
