"""A budget of the copies and waits of a decode step on an accelerator, held on the make-believe one, which refuses float64 and copies late."""

from __future__ import annotations

import json

import pytest
from checkpoints import make_checkpoint
from device_steps import DeviceStep, device_steps
from gguf_files import write_gguf
from golden import golden
from launchers import matrix
from published_formats import PUBLISHED, write_published

FLOAT32 = {"model": "demo", "dtype": "float32", "device": ["npu"]}
DRAWN = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1}


@pytest.fixture
def step_of(fake_device, tmp_path):
    """Decode step of each rank of a launch."""

    def run(options: dict, samplings: list[dict], launcher: str = "single", ranks: int = 1) -> dict[int, DeviceStep]:
        env = fake_device("npu", "no-float64", "late-copies")
        return device_steps(launcher, ranks, FLOAT32 | options, samplings, tmp_path, env)

    return run


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"quantization": "int8"}, DRAWN),
        slow({}, {}),
        slow({}, DRAWN),
        slow({}, DRAWN | {"top_p": 1.0, "min_p": 0.1}),
        slow({"quantization": "int8"}, {}),
        slow({"quantization": "int4"}, {}),
        slow({"quantization": "int4"}, DRAWN),
        slow({"kv_cache_dtype": "int8"}, DRAWN),
        slow({"dtype": "bfloat16"}, DRAWN),
    ],
    ids=str,
)
def test_step_is_one_copy_each_way(options, sampling, step_of):
    step = step_of(options, [sampling])[0]
    step.check(uploads=1, downloads=1)
    assert step.events["late h2d"] and not step.events.get("h2d")  # the only one that waits is that of the tokens
    assert all("sampling.py" in line for line in step.inside("functions"))


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("gptq-asym", "auto"),
        slow("gptq-act-order", "auto"),
        slow("awq", "auto"),
        slow("w8a8", "auto"),
        slow("fp8", "int8"),
        slow("fp8", "none"),
        slow("Q4_0", "auto"),
        slow("Q8_0", "auto"),
        slow("Q4_0", "none"),
    ],
)
def test_quantized_checkpoint_copies_no_more_than_a_plain_one(name, quantization, step_of, tmp_path):
    """Those whose codes are multiplied, and those that are decoded."""
    model = make_checkpoint(tmp_path / "model", "llama-untied")
    if name in PUBLISHED:
        write_published(model, tmp_path / "twin", PUBLISHED[name])
    else:
        model = write_gguf(model, tmp_path / "model.gguf", name)
    step_of({"model": str(model), "quantization": quantization}, [DRAWN])[0].check(uploads=1, downloads=1)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_experts_copy_no_more_than_plain_ones(quantization, step_of):
    directory = golden("qwen3-moe").directory
    num_layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    step = step_of({"model": str(directory), "quantization": quantization}, [DRAWN])[0]
    step.check(uploads=1, downloads=1 + num_layers)


MASK = {"structured_outputs": {"regex": "[a-z ]{700}"}, "ignore_eos": False}
BIAS = {"logit_bias": {"7": 1.5, "8": -2.0}}
ALLOWED = {"allowed_token_ids": list(range(100, 200))}
LOGPROBS = {"logprobs": 5}


@pytest.mark.parametrize(
    "samplings",
    [
        [DRAWN | PENALTIES | LOGPROBS, BIAS, DRAWN | ALLOWED, MASK | DRAWN, LOGPROBS, DRAWN, {}],
        slow([PENALTIES, BIAS | LOGPROBS, ALLOWED, MASK, {}]),
        slow([DRAWN | LOGPROBS, DRAWN, {}]),
        slow([DRAWN | PENALTIES | BIAS | LOGPROBS] * 3),
        slow([MASK | DRAWN | PENALTIES | LOGPROBS] * 3),
    ],
    ids=str,
)
def test_rows_of_all_kinds_share_two_copies_each_way(samplings, step_of):
    """Index tensors, and what all rows need; tokens, and log-probabilities."""
    step = step_of({}, samplings)[0]
    step.check(uploads=2, downloads=2)
    assert list(step.inside("functions").values()) in ([], [1.0]), step.events  # the drawn rows


@pytest.mark.parametrize(
    ("sampling", "num_sequences", "uploads"),
    [
        (DRAWN | PENALTIES, 3, 1),
        slow(MASK, 3, 1),
        slow(MASK | DRAWN, 1, 1),
        slow({"min_tokens": "max_tokens", "stop_token_ids": [7, 8, 9]}, 3, 0),
        slow({"bad_words": ["the", "river"]}, 3, 0),
        slow(BIAS, 1, 1),
        slow(BIAS, 3, 1),
        slow(ALLOWED, 1, 1),
        slow(DRAWN | LOGPROBS, 1, 0),
    ],
    ids=str,
)
def test_parameters_of_all_rows_are_one_copy(sampling, num_sequences, uploads, step_of):
    downloads = 2 if "logprobs" in sampling else 1
    step_of({}, [sampling] * num_sequences)[0].check(uploads=1 + uploads, downloads=downloads)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v2-lite", "qwen3.5", "gemma3"])
def test_layers_copy_nothing_but_the_experts_of_tokens(kind, step_of):
    directory = golden(kind).directory
    config = json.loads((directory / "config.json").read_text())
    has_experts = kind in ("qwen3-moe", "deepseek-v2-lite")
    num_layers = config.get("num_hidden_layers", 0) if has_experts else 0
    step = step_of({"model": str(directory)}, [DRAWN])[0]
    step.check(uploads=1 + (kind == "gemma3"), downloads=1 + num_layers)  # windows have block tables of their own


@pytest.mark.parametrize(
    ("launcher", "devices"),
    matrix(over=[(devices,) for devices in (("npu", "npu"), ("npu", "cpu"), ("cpu", "npu"))]),
)
def test_hop_between_stages_is_one_copy_each_way(launcher, devices, step_of):
    steps = step_of({"device": list(devices), "pipeline_parallel_size": 2}, [{}], launcher, 2)
    through_host = launcher == "mpirun" or "cpu" in devices
    assert sorted(steps) == [rank for rank, device in enumerate(devices) if device == "npu"]
    if devices[0] == "npu":  # sends; it may wait until its index tensors have been copied
        steps[0].check(uploads=1, downloads=through_host, waits=1)
    if devices[1] == "npu":  # receives, and samples
        steps[1].check(uploads=1 + through_host, downloads=1)
