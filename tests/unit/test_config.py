"""Options: what they convert to, what they refuse, and the set of flags, frozen."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time

import pytest

from labinfer.bench.options import AccuracyOptions, BenchOptions, LatencyOptions, LoadOptions, ServeOptions
from labinfer.cli import COMMANDS, build_parser, program_name, split_command
from labinfer.config import SECTIONS, EngineOptions, JobOptions
from labinfer.errors import UserError
from labinfer.flags import OTHER_ENGINES
from labinfer.gateway.options import ServerOptions
from labinfer.option_fields import check_bounds, convert_section
from labinfer.sampling_options import SamplingOptions
from labinfer.terminal.options import ChatOptions

ENGINE_FLAGS = {
    "--model", "--tokenizer", "--response-template", "--chat-template", "--dtype", "--max-model-len", "--sliding-window",
    "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--layers", "--experts", "--ranks", "--layout", "--device", "--transport",
    "--block-size", "--num-kv-blocks", "--kv-cache-dtype", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--snapshot-interval", "--swap-space", "--expert-offload", "--weight-cache-size", "--memory-utilization",
    "--max-num-seqs", "--max-num-batched-tokens", "--chunked-prefill-size", "--max-queued-requests",
    "--scheduling-policy", "--batch-policy", "--preemption-mode", "--context-shift", "--keep",
    "--pipeline-schedule", "--max-inflight",
    "--threads", "--log-level", "--timeout", "--fault-timeout", "--functions", "--trace", "--profile", "--autotune", "--no-autotune",
    "--weights", "--quantization", "-q", "--quantization-group-size", "--head-preview",
}  # fmt: skip
SAMPLING_FLAGS = {
    "--max-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "--seed", "--stop", "--ignore-eos",
    "--repetition-penalty", "--presence-penalty", "--frequency-penalty", "--min-tokens", "--n",
    "--num-beams", "--length-penalty",
}  # fmt: skip
GENERATE_FLAGS = (
    ENGINE_FLAGS | SAMPLING_FLAGS | {"--prompt", "--raw", "--input", "--max-line-size", "--output", "--report"}
    | {"--output-format"}
    | {"--overwrite", "--resume", "--retry-errors", "--progress"}
)  # fmt: skip
CHAT_FLAGS = (
    (ENGINE_FLAGS | SAMPLING_FLAGS | {"--url", "--api-key", "--system"})
    - {"--trace", "--profile", "--n", "--num-beams", "--length-penalty"}
)  # fmt: skip
COMM_FLAGS = {
    "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--layers", "--experts", "--ranks", "--device", "--transport",
    "--threads", "--log-level", "--timeout", "--fault-timeout",
}  # fmt: skip
ACCURACY_FLAGS = COMM_FLAGS | {
    "--layout", "--text", "--reference-dtype", "--per-layer", "--output-json",
    "--model", "--tokenizer", "--response-template", "--chat-template", "--dtype", "--max-model-len", "--sliding-window",
    "--functions", "--autotune", "--no-autotune",
    "--weights", "--quantization", "-q", "--quantization-group-size", "--head-preview",
    "--block-size", "--num-kv-blocks", "--kv-cache-dtype", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--snapshot-interval", "--swap-space", "--expert-offload", "--weight-cache-size", "--memory-utilization",
}  # fmt: skip
BENCH_FLAGS = ENGINE_FLAGS | {"--input-len", "--output-len", "--seed", "--output-json", "--plot"}
LOAD_FLAGS = BENCH_FLAGS | {"--num-prompts", "--num-warmups", "--dataset", "--workload"}
SIMULATE_FLAGS = {
    "--cluster", "--link", "--replay", "--find-rate", "--input-len", "--output-len", "--seed", "--output-json", "--plot",
    "--num-prompts", "--num-warmups", "--dataset", "--workload", "--request-rate", "--burstiness", "--max-concurrency", "--goodput",
    "--dtype", "--quantization", "-q", "--max-model-len",
    "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--layers", "--ranks",
    "--block-size", "--num-kv-blocks", "--enable-prefix-caching", "--no-enable-prefix-caching", "--snapshot-interval",
    "--memory-utilization", "--max-num-seqs", "--max-num-batched-tokens", "--chunked-prefill-size", "--max-queued-requests",
    "--scheduling-policy", "--batch-policy", "--preemption-mode", "--context-shift", "--keep",
    "--pipeline-schedule", "--max-inflight", "--log-level", "--trace", "--profile",
}  # fmt: skip

FUNCTIONS_FLAGS = {
    "--output-json", "--plot", "--model", "--tokenizer", "--response-template", "--chat-template", "--dtype", "--max-model-len", "--sliding-window",
    "--functions", "--autotune", "--no-autotune", "--weights", "--quantization", "-q", "--quantization-group-size",
    "--head-preview",
    "--block-size", "--num-kv-blocks", "--kv-cache-dtype", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--snapshot-interval", "--swap-space", "--expert-offload", "--weight-cache-size", "--memory-utilization",
} | COMM_FLAGS  # fmt: skip


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("generate", GENERATE_FLAGS),
        ("chat", CHAT_FLAGS),
        ("plan", ENGINE_FLAGS | {"--auto", "--cluster", "--link", "--objective", "--workload", "--save"}),
        ("probe", FUNCTIONS_FLAGS - {"--output-json", "--plot"} | {"--save"}),
        ("cache", {"--clean"}),
        ("bench comm", COMM_FLAGS),
        ("bench accuracy", ACCURACY_FLAGS),
        ("bench latency", BENCH_FLAGS | {"--batch-size", "--num-iters", "--num-iters-warmup"}),
        ("bench throughput", LOAD_FLAGS),
        ("bench serve", LOAD_FLAGS | {"--request-rate", "--burstiness", "--max-concurrency", "--goodput"}),
        ("bench functions", FUNCTIONS_FLAGS),
        ("simulate", SIMULATE_FLAGS),
    ],
)
def test_set_of_flags_is_frozen(command, flags):
    """A flag that comes or goes is a decision: change this list together with CHANGELOG.md."""
    assert flags_of(build_parser(command)) == flags | {"--version"}


def test_set_of_commands_is_frozen():
    benchmarks = {f"bench {kind}" for kind in ("latency", "throughput", "serve", "comm", "accuracy", "functions")}
    assert (
        set(COMMANDS) == {"generate", "serve", "chat", "plan", "probe", "simulate", "supervise", "cache"} | benchmarks
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_help(command):
    for action in build_parser(command)._actions:
        assert action.help, action.option_strings
        assert "default" in action.help or action.dest in ("help", "version"), action.option_strings


@pytest.mark.parametrize(
    ("started", "name", "example"),
    [
        ("/src/launch.py", "launch.py", "\n  python launch.py chat"),
        ("/env/bin/labinfer", "labinfer", "\n  labinfer chat"),
        ("/src/labinfer/__main__.py", "labinfer", "torchrun --nproc-per-node 4 -m labinfer --model"),
    ],
)
def test_program_calls_itself_as_it_was_called(started, name, example):
    parser = build_parser(program=program_name(started))
    assert parser.format_help().startswith(f"usage: {name} [-h]") and example in parser.format_help()
    with pytest.raises(UserError, match=f"see {name} plan --help"):
        build_parser("plan", program_name(started)).parse_args(["--modle", "x"])


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
        ("block_size", "32", "cache", 32),
        ("block_size", None, "cache", 16),
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


@pytest.mark.parametrize(
    ("arguments", "autotune"),
    [
        ([], None),
        (["--autotune"], "on"),
        (["--autotune", "again"], "again"),
        (["--no-autotune"], "off"),
        (["--autotune", "off"], "off"),
    ],
)
def test_switch_is_given_alone_negated_or_with_a_value(arguments, autotune):
    assert build_parser().parse_args([*arguments, "--model", "demo"]).autotune == autotune


@pytest.mark.parametrize(("given", "autotune"), [(True, "on"), (False, "off"), ("again", "again"), (None, "on")])
def test_switch_takes_truth_values_of_python(given, autotune):
    assert EngineOptions.from_flat({"autotune": given}).model.autotune == autotune


def test_start_that_measures_anew_finds_packed_weights_of_one_that_does_not():
    on, again, off = (EngineOptions.from_flat({"autotune": value}).weight_options for value in ("on", "again", "off"))
    assert on == again != off


def test_what_is_not_given_keeps_its_default():
    assert EngineOptions.from_flat({"model": "m"}).scheduler == EngineOptions().scheduler


@pytest.mark.parametrize("key", ["tensor_paralel_size", "prompt", "seed", "model ", ""])
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
        ("block_size", 0),
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
        with pytest.raises(UserError, match="--request-rate must be a finite number"):
            check_bounds(convert_section(ServeOptions, {"request_rate": rate}))


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


def test_help_is_printed_without_importing_torch():
    code = (
        "import sys\nfrom labinfer.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "sys.stderr.write('torch' if 'torch' in sys.modules else 'light')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "light"
    for flag in GENERATE_FLAGS:
        assert flag in done.stdout


def test_help_is_there_in_half_a_second():
    times = []
    for _ in range(3):  # the best of three, as other processes may want the cores
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "labinfer", "--help"], stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.5


@pytest.mark.parametrize(
    ("arguments", "command", "rest"),
    [
        (["--model", "plan"], "generate", ["--model", "plan"]),
        (["plan", "--model", "x"], "plan", ["--model", "x"]),
        (["bench", "comm"], "bench comm", []),
        ([], "generate", []),
    ],
)
def test_command_is_the_words_before_the_flags(arguments, command, rest):
    assert split_command(arguments) == (command, rest)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"quantization": "int3"}, "--quantization int3: choose one of auto, none, int8, int4"),
        ({"quantization": "int4", "quantization_group_size": 48}, "group-size 48: choose one of 32,64,128"),
        ({"quantization_group_size": 32}, "group-size 32 is for int4 only; add --quantization int4"),
        ({"quantization": "int8", "quantization_group_size": 128}, "group-size 128 is for int4 only"),
    ],
)
def test_quantizations_that_make_no_sense_are_refused(options, complaint):
    with pytest.raises(UserError, match=complaint):
        EngineOptions.from_flat(options)


@pytest.mark.parametrize("words", [["bench"], ["serves"], ["comm", "plan"]])
def test_words_that_are_no_command_are_refused(words):
    with pytest.raises(UserError) as caught:
        split_command([*words, "--threads", "1"])
    assert repr(" ".join(words)) in str(caught.value) and "bench comm" in str(caught.value)


@pytest.mark.parametrize(
    ("command", "arguments", "complaint"),
    [
        ("generate", ["-m", "DIR"], "unknown option -m (did you mean --model?)"),
        ("serve", ["-c", "2048"], "unknown option -c (did you mean --max-model-len?)"),
        ("serve", ["-np=4"], "unknown option -np (did you mean --max-num-seqs?)"),
        ("generate", ["-t", "4"], "unknown option -t (did you mean --threads?)"),  # no abbreviation of -tp
        ("generate", ["-p", "Hello"], "unknown option -p (did you mean --prompt?)"),
        ("generate", ["-ngl", "99"], "(did you mean --device cuda, or --device cuda,cpu --layers 14,10 on two ranks?)"),
        ("generate", ["--wrong"], "unknown option --wrong; see"),
        ("serve", ["--gpu-memory-utilization=0.9"], "(did you mean --memory-utilization?)"),
        ("generate", ["--prompt", "two", "words"], "unexpected 'words'; quote a text that has spaces"),
        ("generate", ["--model", "demo", "serve"], "unexpected 'serve'; commands come first"),
        (
            "generate",
            ["--prompt", "“17", "+", "25”"],
            "unexpected '+'; to a shell only \" and ' are quotes, not “ and ”",
        ),
    ],
)
def test_flags_of_other_engines_lead_to_ours(command, arguments, complaint):
    with pytest.raises(UserError) as caught:
        build_parser(command).parse_args(arguments)
    assert complaint in str(caught.value)


def test_flags_of_other_engines_are_none_of_ours():
    ours = {flag for command in COMMANDS for flag in build_parser(command)._option_string_actions}
    assert not ours & OTHER_ENGINES.keys() and {name.split()[0] for name in OTHER_ENGINES.values()} <= ours


@pytest.mark.parametrize("word", ["—prompt", "－－prompt", "–prompt"])
def test_dash_that_is_no_hyphen_is_named(word):
    with pytest.raises(
        UserError, match=f"unknown option {word}: it begins with a dash; options begin with two hyphens"
    ):
        split_command([word, "Hello"])
    with pytest.raises(UserError, match=f"unknown option {word}"):
        split_command(["serve", word, "8001"])
    with pytest.raises(UserError, match=f"unknown option {word}"):
        build_parser().parse_args(["--model", "demo", word, "Hello"])


def test_comma_of_a_chinese_keyboard_is_one():
    assert EngineOptions.from_flat({"tensor_parallel_size": "2，1"}).parallel.tensor_parallel_size == (2, 1)


def test_short_option_may_be_joined_to_its_value():
    assert build_parser().parse_args(["-qint8"]).quantization == "int8"


def test_model_after_the_command_leads_to_its_flag():
    with pytest.raises(UserError, match="serve: unexpected 'DIR'; a model is given as --model DIR"):
        split_command(["serve", "DIR", "-tp", "2"])


def test_wrong_flag_is_a_usage_error_without_importing_torch():
    code = (
        "import sys\nfrom labinfer.cli import main\nstatus = main(['--modle', 'x', '--seed', '1'])\n"
        "print('torch' in sys.modules)\nraise SystemExit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.strip() == "False"
    assert done.stderr.startswith("labinfer: error: ") and "--modle" in done.stderr and done.stderr.count("\n") == 1
