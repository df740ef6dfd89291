"""Options: what they convert to, and what they refuse."""

from __future__ import annotations

import dataclasses

import pytest

from labinfer.api.batch.options import JobOptions
from labinfer.base.config import SECTIONS, EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.option_fields import check_bounds, convert_section
from labinfer.base.sampling_options import SamplingOptions
from labinfer.cli.bench.options import AccuracyOptions, BenchOptions, LatencyOptions, LoadOptions, ServeOptions
from labinfer.cli.terminal.options import ChatOptions
from labinfer.server.gateway.options import ServerOptions


@pytest.mark.parametrize(
    "section",
    [
        *SECTIONS,
        AccuracyOptions,
        ChatOptions,
        JobOptions,
        SamplingOptions,
        ServerOptions,
        BenchOptions,
        LatencyOptions,
        LoadOptions,
        ServeOptions,
    ],
)
def test_every_option_and_section_is_explained(section):
    assert section.__doc__
    for f in dataclasses.fields(section):
        assert f.metadata["help"].strip(), f.name


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineOptions().cache.block_size = 3


@pytest.mark.parametrize(
    ("key", "given", "section", "value"),
    [
        ("tensor_parallel_size", "2,1", "parallel", (2, 1)),
        ("tensor_parallel_size", " 2, 1 ", "parallel", (2, 1)),
        ("tensor_parallel_size", [2, 1], "parallel", (2, 1)),
        ("tensor_parallel_size", (3,), "parallel", (3,)),
        ("tensor_parallel_size", 2, "parallel", (2,)),
        ("layers", "14,10", "parallel", (14, 10)),
        ("device", "cuda,cpu", "parallel", ("cuda", "cpu")),
        ("dtype", "float32", "model", ("float32",)),
        ("dtype", ["bfloat16", "float32"], "model", ("bfloat16", "float32")),
        ("dtype", "half", "model", ("float16",)),
        ("dtype", "fp16,bf16", "model", ("float16", "bfloat16")),
        ("dtype", ["float", "fp32"], "model", ("float32", "float32")),
        ("kv_cache_dtype", "bf16", "cache", "bfloat16"),
        ("block_size", "32", "cache", 32),
        ("block_size", None, "cache", 0),
        ("tokenizer", None, "model", ""),
        ("block_size", 32.0, "cache", 32),
        ("memory_utilization", "0.5", "cache", 0.5),
        ("memory_utilization", 1, "cache", 1.0),
        ("timeout", "2.5", "runtime", 2.5),
        ("tokenizer", "", "model", ""),
        ("pipeline_schedule", "gpipe", "scheduler", "gpipe"),
    ],
)
def test_values_are_converted(key, given, section, value):
    converted = getattr(getattr(EngineOptions.from_flat({key: given}), section), key)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(("given", "autotune"), [(True, "on"), (False, "off"), ("again", "again"), (None, "on")])
def test_switch_takes_truth_values_of_python(given, autotune):
    assert EngineOptions.from_flat({"autotune": given}).model.autotune == autotune


def test_start_that_measures_anew_finds_packed_weights_of_one_that_does_not():
    on, again, off = (EngineOptions.from_flat({"autotune": value}).weight_options for value in ("on", "again", "off"))
    assert on == again != off


def test_what_is_not_given_keeps_its_default():
    assert EngineOptions.from_flat({"model": "m"}).scheduler == EngineOptions().scheduler


@pytest.mark.parametrize("key", ["tensor_paralel_size", "prompt", ""])
def test_unknown_keys_are_refused_with_the_known_ones(key):
    with pytest.raises(UserError) as caught:
        EngineOptions.from_flat({key: 1})
    assert repr(key) in str(caught.value) and "tensor_parallel_size" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", "16.5"),
        ("block_size", 16.5),
        ("block_size", "many"),
        ("block_size", True),
        ("block_size", ""),
        ("block_size", -1),
        ("num_kv_blocks", -1),
        ("memory_utilization", 0.0),
        ("memory_utilization", 1.01),
        ("memory_utilization", float("nan")),
        ("memory_utilization", "half"),
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", "2,"),
        ("tensor_parallel_size", "2,-1"),
        ("tensor_parallel_size", ()),
        ("pipeline_parallel_size", -1),
        ("layers", "3,0"),
        ("dtype", "int8"),
        ("dtype", "float32,"),
        ("dtype", ()),
        ("device", ""),
        ("model", ""),
        ("transport", "carrier-pigeon"),
        ("pipeline_schedule", "1F1B"),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("chunked_prefill_size", 0),
        ("max_inflight", -2),
        ("max_model_len", -1),
        ("sliding_window", -1),
        ("sliding_window", "8,8"),
        ("threads", -1),
        ("timeout", 0),
        ("timeout", float("nan")),
        ("weight_cache_size", "nan"),
        ("weight_cache_size", "inf"),
        ("weight_cache_size", float("-inf")),
        ("weight_cache_size", -1),
        ("swap_space", "inf"),
        ("expert_offload", "nan"),
    ],
)
def test_values_out_of_bounds_are_refused_by_their_flags_name(key, value):
    with pytest.raises(UserError) as caught:
        EngineOptions.from_flat({key: value})
    assert "--" + key.replace("_", "-") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_number_that_is_infinite_by_default_may_be():
    for rate in ("inf", "3"):
        check_bounds(convert_section(ServeOptions, {"request_rate": rate}))
    for rate in ("nan", "-inf"):
        with pytest.raises(UserError, match=f"--request-rate must be above 0, not {rate}"):
            convert_section(ServeOptions, {"request_rate": rate})


def server_options(**values) -> ServerOptions:
    """As the command line makes them."""
    options = convert_section(ServerOptions, values)
    check_bounds(options)
    return options


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--port", {"port": 65536}),
        ("--port", {"port": -1}),
        ("--max-concurrent-requests", {"max_concurrent_requests": -1}),
        ("--max-concurrent-requests", {"max_waiting_per_caller": 3}),
        ("--tokens-per-minute", {"tokens_per_minute": "1.5"}),
        ("--max-body-size", {"max_body_size": 0}),
        ("--request-timeout", {"request_timeout": "nan"}),
        ("--request-timeout", {"request_timeout": "-1"}),
        ("--drain-timeout", {"drain_timeout": "inf"}),
        ("--host", {"host": ""}),
        ("--api-key", {"api_key": [""]}),
    ],
)
def test_server_options_out_of_bounds_are_refused_by_their_flags_name(flag, values):
    with pytest.raises(UserError) as caught:
        server_options(**values)
    assert flag in str(caught.value)


def test_server_listens_to_this_machine_only_and_does_not_print_its_keys():
    options = server_options(api_key=["first-secret", "a,b-secret"], request_timeout="0", port="0")
    assert options.host == "127.0.0.1"
    assert options.api_key == ("first-secret", "a,b-secret")
    assert "secret" not in repr(options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"quantization": "int3"}, "--quantization int3: choose one of auto, none, int8, int4"),
        ({"quantization": "int4", "quantization_group_size": 48}, "group-size 48: choose one of 32,64,128"),
        ({"quantization_group_size": 32}, "group-size 32 is for int4 only; add --quantization int4"),
        ({"quantization": "int8", "quantization_group_size": 128}, "group-size 128 is for int4 only"),
        ({"quantization": ["none", "int3"]}, "--quantization int3: choose one of auto, none, int8, int4"),
        ({"quantization": "none,int8", "quantization_group_size": 128}, "group-size 128 is for int4 only"),
        (
            {"quantization": "none,int8", "weights": "packed12"},
            "--quantization none,int8 quantizes them; leave one out",
        ),
    ],
)
def test_quantizations_that_make_no_sense_are_refused(options, complaint):
    with pytest.raises(UserError, match=complaint):
        EngineOptions.from_flat(options)


def test_comma_of_a_chinese_keyboard_is_one():
    assert EngineOptions.from_flat({"tensor_parallel_size": "2，1"}).parallel.tensor_parallel_size == (2, 1)


@pytest.mark.parametrize("name", ["awq", "gptq_marlin", "fp8", "compressed-tensors"])
def test_quantization_of_a_checkpoint_need_not_be_named(name):
    with pytest.raises(UserError, match=f"^--quantization {name}: leave it out for a checkpoint in this format"):
        EngineOptions.from_flat({"quantization": name})


@pytest.mark.parametrize("name", ["bitsandbytes", "marlin"])
def test_quantization_that_no_checkpoint_may_have_is_not_recommended(name):
    with pytest.raises(UserError, match=f"^--quantization {name}: choose one of auto, none, int8, int4$"):
        EngineOptions.from_flat({"quantization": name})
