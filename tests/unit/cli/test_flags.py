"""Commands and their flags: the set of them, frozen; what the help says, and what wrong words lead to."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import pytest

from labinfer.base.errors import UserError
from labinfer.base.other_engines import NEEDLESS, REPLACEMENTS, SAME_OPTIONS, UNSUPPORTED
from labinfer.base.sampling_options import as_flags
from labinfer.cli.command_table import COMMANDS
from labinfer.cli.flags import build_parser, program_name, split_command

ENGINE_FLAGS = {
    "--model", "--hub", "--tokenizer", "--response-template", "--chat-template", "--reranker", "--dtype", "--max-model-len", "--sliding-window",
    "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--layers", "--experts", "--ranks", "--layout", "--device", "--transport",
    "--block-size", "--num-kv-blocks", "--kv-cache-dtype", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--prefix-cache-eviction", "--snapshot-interval", "--swap-space", "--expert-offload", "--weight-cache-size", "--memory-utilization",
    "--max-num-seqs", "--max-num-batched-tokens", "--chunked-prefill-size", "--max-queued-requests",
    "--scheduling-policy", "--batch-policy", "--preemption-mode", "--context-shift", "--keep",
    "--pipeline-schedule", "--max-inflight", "--speculative-config",
    "--threads", "--log-level", "--timeout", "--fault-timeout", "--port-range", "--functions", "--trace", "--profile", "--step-sink",
    "--autotune", "--no-autotune", "--reproducible", "--no-reproducible",
    "--weights", "--quantization", "-q", "--quantization-group-size", "--ignore-tensors",
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
    "--threads", "--log-level", "--timeout", "--fault-timeout", "--port-range",
}  # fmt: skip
ACCURACY_FLAGS = COMM_FLAGS | {
    "--layout", "--text", "--reference-dtype", "--per-layer", "--output-json",
    "--model", "--hub", "--tokenizer", "--response-template", "--chat-template", "--reranker", "--dtype", "--max-model-len", "--sliding-window",
    "--functions", "--autotune", "--no-autotune", "--reproducible", "--no-reproducible",
    "--weights", "--quantization", "-q", "--quantization-group-size", "--ignore-tensors",
    "--block-size", "--num-kv-blocks", "--kv-cache-dtype", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--prefix-cache-eviction", "--snapshot-interval", "--swap-space", "--expert-offload", "--weight-cache-size", "--memory-utilization",
}  # fmt: skip
BENCH_FLAGS = ENGINE_FLAGS | {"--input-len", "--output-len", "--seed", "--output-json", "--plot"}
LOAD_FLAGS = BENCH_FLAGS | {"--num-prompts", "--num-warmups", "--dataset", "--workload"}
SIMULATE_FLAGS = {
    "--cluster", "--link", "--replay", "--find-rate", "--input-len", "--output-len", "--seed", "--output-json", "--plot",
    "--num-prompts", "--num-warmups", "--dataset", "--workload", "--request-rate", "--burstiness", "--max-concurrency", "--goodput",
    "--dtype", "--quantization", "-q", "--max-model-len",
    "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--layers", "--ranks",
    "--block-size", "--num-kv-blocks", "--enable-prefix-caching", "--no-enable-prefix-caching", "--prefix-cache-eviction", "--snapshot-interval",
    "--memory-utilization", "--max-num-seqs", "--max-num-batched-tokens", "--chunked-prefill-size", "--max-queued-requests",
    "--scheduling-policy", "--batch-policy", "--preemption-mode", "--context-shift", "--keep",
    "--pipeline-schedule", "--max-inflight", "--log-level", "--trace", "--profile",
}  # fmt: skip
FUNCTIONS_FLAGS = {
    "--output-json", "--plot", "--model", "--hub", "--tokenizer", "--response-template", "--chat-template",
    "--reranker", "--dtype", "--max-model-len", "--sliding-window",
    "--functions", "--autotune", "--no-autotune", "--reproducible", "--no-reproducible", "--weights", "--quantization", "-q", "--quantization-group-size",
    "--ignore-tensors",
    "--block-size", "--num-kv-blocks", "--kv-cache-dtype", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--prefix-cache-eviction", "--snapshot-interval", "--swap-space", "--expert-offload", "--weight-cache-size", "--memory-utilization",
} | COMM_FLAGS  # fmt: skip


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings} - {"-h", "--help", "--help-all"}


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("generate", GENERATE_FLAGS),
        ("chat", CHAT_FLAGS),
        ("plan", ENGINE_FLAGS | {"--auto", "--cluster", "--link", "--objective", "--workload", "--save"}),
        ("probe", FUNCTIONS_FLAGS - {"--output-json", "--plot"} | {"--save"}),
        ("cache", {"--clean"}),
        (
            "check-device",
            {"--json", "--device", "--threads", "--log-level", "--timeout", "--fault-timeout", "--port-range"},
        ),
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
    assert flags_of(build_parser(command)) == flags | {"--version", "--plugin"}


def test_set_of_commands_is_frozen():
    benchmarks = {f"bench {kind}" for kind in ("latency", "throughput", "serve", "comm", "accuracy", "functions")}
    assert (
        set(COMMANDS)
        == {"generate", "serve", "chat", "verify", "plan", "probe", "simulate", "supervise", "cache", "check-device"}
        | benchmarks
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_help(command):
    parser = build_parser(command)
    assert ("\nweight cache:\n" in parser.format_help()) == (command == "cache")
    for action in parser._actions:
        assert action.help, action.option_strings
        assert "default" in action.help or action.dest in ("help", "version"), action.option_strings


def help_of(arguments: list[str], capsys: pytest.CaptureFixture, program: str = "launch.py") -> str:
    """What ``--help`` and the like print."""
    command, flags = split_command(arguments)
    with pytest.raises(SystemExit) as ended:
        build_parser(command, program).parse_args(flags)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_a_summary_that_fits_a_screen(flag, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_of([flag], capsys)
    lines = text.splitlines()
    assert lines[0] == "usage: launch.py COMMAND [OPTION …]"
    written = [line for line in lines if not line.startswith(("  python ", "  torchrun ", "  mpirun "))]
    assert max(map(len, written)) <= columns and (columns < 80 or len(lines) <= 60)
    (begin, end) = lines.index("commands:"), lines.index("", lines.index("commands:"))
    commands = [line.split()[1] for line in lines[begin:end] if line.startswith("  launch.py ")]
    assert commands == [
        "--prompt", "--input", "serve", "chat", "supervise", "verify", "plan", "probe", "simulate", "cache", "check-device", "bench"
    ]  # fmt: skip


def test_summary_names_every_option_of_a_job_and_help_all_explains_them(capsys):
    summary, everything = help_of(["--help"], capsys), help_of(["--help-all"], capsys)
    words = summary.split()
    for action in build_parser()._actions:
        flags = {*action.option_strings} - {"-h"}
        if action.dest not in ("help", "version") and not action.option_strings[0].startswith("--no-"):
            assert any(words.count(flag) for flag in flags), flags
        assert all(flag in everything for flag in flags)
    assert "fraction of" in everything and "fraction of" not in summary


@pytest.mark.parametrize("command", ["serve", "bench latency", "plan"])
def test_help_of_a_command_explains_its_options_with_either_flag(command, capsys):
    text = help_of([*command.split(), "--help"], capsys)
    assert text.startswith(f"usage: launch.py {command} [-h] ") and "--memory-utilization F\n" in text
    assert help_of([*command.split(), "--help-all"], capsys) == text


@pytest.mark.parametrize(
    ("started", "name", "example"),
    [
        ("/src/launch.py", "launch.py", "\n  python launch.py serve"),
        ("/env/bin/labinfer", "labinfer", "\n  labinfer serve"),
        ("/src/labinfer/__main__.py", "labinfer", "torchrun --nproc-per-node 4 -m labinfer --model"),
    ],
)
def test_program_calls_itself_as_it_was_called(started, name, example, capsys):
    text = help_of(["--help"], capsys, program_name(started))
    assert text.startswith(f"usage: {name} COMMAND") and example in text
    with pytest.raises(UserError, match=f"see {name} plan --help"):
        build_parser("plan", program_name(started)).parse_args(["--modle", "x"])


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


def test_help_is_printed_without_importing_torch():
    code = (
        "import sys\nfrom labinfer.cli.main import main\n"
        "try:\n    main(['--help-all'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "sys.stderr.write('torch' if 'torch' in sys.modules else 'light')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "light"
    for flag in GENERATE_FLAGS:
        assert flag in done.stdout


def test_goal_that_makes_no_sense_is_refused_without_importing_torch():
    code = (
        "import sys\nfrom labinfer.cli.main import main\n"
        "assert main(['bench', 'serve', '--goodput', 'ttft:fast']) == 2 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("labinfer: error: --goodput 'ttft:fast': ")


@pytest.mark.timing
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
    ("words", "near"),
    [("serv", "serve"), ("prob", "probe"), ("bench servr", "bench serve"), ("bench foo", ""), ("hello", "")],
)
def test_command_that_is_misspelt_is_told_what_is_near(words, near):
    with pytest.raises(UserError) as caught:
        split_command(words.split())
    hint = f" (did you mean {near}?)" if near else "; commands: serve, "
    assert str(caught.value).startswith(f"unknown command {words!r}{hint}")


@pytest.mark.parametrize("words", [["bench"], ["hello"], ["comm", "plan"]])
def test_words_that_are_no_command_are_refused(words):
    with pytest.raises(UserError) as caught:
        split_command([*words, "--threads", "1"])
    assert repr(" ".join(words)) in str(caught.value) and "bench comm" in str(caught.value)


@pytest.mark.parametrize(
    ("command", "arguments", "complaint"),
    [
        ("generate", ["-m", "DIR"], "unknown option -m (did you mean --model?)"),
        ("generate", ["--modle", "DIR"], "unknown option --modle (did you mean --model?)"),
        ("generate", ["--spec", "DIR"], "unknown option --spec (did you mean --speculative-config?)"),
        ("generate", ["--stream"], "unknown option --stream;"),  # nothing is near
        ("serve", ["--quant", "int8"], "unknown option --quant (did you mean --quantization?)"),
        ("serve", ["--max", "5"], "unknown option --max;"),  # many are
        ("serve", ["--top", "5"], "unknown option --top;"),
        ("simulate", ["--layout", "plan.json"], "unknown option --layout;"),
        ("serve", ["-c", "2048"], "unknown option -c (did you mean --max-model-len?)"),
        ("serve", ["-np=4"], "unknown option -np (did you mean --max-num-seqs?)"),
        ("generate", ["-t", "4"], "unknown option -t (did you mean --threads?)"),  # no abbreviation of -tp
        ("generate", ["-p", "Hello"], "unknown option -p (did you mean --prompt?)"),
        ("generate", ["-ngl", "99"], "(did you mean --device cuda, or --device cuda,cpu --layers 14,10 on two ranks?)"),
        ("generate", ["--wrong"], "unknown option --wrong; see"),
        ("serve", ["--gpu-memory-utilization=0.9"], "(did you mean --memory-utilization?)"),
        ("serve", ["--tool-call-parser", "hermes"], "leave it out: the format is recognized by the chat template;"),
        ("serve", ["--enable-lora"], "unknown option --enable-lora: LoRA adapters are not supported; merge "),
        ("serve", ["--enable-expert-parallel"], "(did you mean --experts whole?)"),
        ("serve", ["-dp", "2"], "unknown option -dp: a server runs one replica of the model;"),
        ("serve", ["--nnodes", "2"], "unknown option --nnodes: the launcher connects the hosts; give it to torchrun"),
        ("serve", ["--uds", "/tmp/x"], "unknown option --uds: the server listens on TCP; give --host and --port"),
        ("serve", ["--disable-log-requests"], "leave it out: requests are logged only with --log-json, and never "),
        ("serve", ["--kv-cache-memory-bytes", "9"], "(did you mean --num-kv-blocks?)"),
        ("bench serve", ["--random-input-len", "9"], "(did you mean --input-len?)"),
        (
            "serve",
            ["--trust-remote-code"],
            "unknown option --trust-remote-code; leave it out: the code of a checkpoint ",
        ),
        (
            "generate",
            ["--enforce-eager"],
            "unknown option --enforce-eager; leave it out: captured steps do not change ",
        ),
        ("generate", ["--prompt", "two", "words"], "unexpected 'words'; put quotes around a text with spaces"),
        ("generate", ["--model", "demo", "serve"], "unexpected 'serve'; commands come first"),
        (
            "generate",
            ["--prompt", "“17", "+", "25”"],
            "unexpected '+'; shells know only the quotes \" and ', not “ and ”",
        ),
    ],
)
def test_flags_of_other_engines_lead_to_ours(command, arguments, complaint):
    with pytest.raises(UserError) as caught:
        build_parser(command).parse_args(arguments)
    assert complaint in str(caught.value)


def test_flags_of_other_engines_are_none_of_ours():
    ours = {flag for command in COMMANDS for flag in build_parser(command)._option_string_actions}
    assert (
        not ours & {*REPLACEMENTS, *NEEDLESS, *UNSUPPORTED}
        and {name.split()[0] for name in REPLACEMENTS.values()} <= ours
    )


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (["--tp", "2", "--pp", "3"], ["-tp", "2", "-pp", "3"]),
        (["--tp=2,1"], ["-tp", "2,1"]),
        (["--tp-size", "2", "--pp-size", "2"], ["-tp", "2", "-pp", "2"]),
        (["--tensor-parallel", "2", "--pipeline-parallel", "2"], ["-tp", "2", "-pp", "2"]),
    ],
)
def test_other_names_of_the_same_option_are_taken_and_not_listed(given, same):
    for command in ("generate", "serve", "chat", "plan", "bench latency", "bench comm"):
        parser = build_parser(command)
        assert parser.parse_args(given) == parser.parse_args(same)
        assert not {flag.partition("=")[0] for flag in given if flag.startswith("--")} & flags_of(parser)
    assert {"tensor_parallel_size", "pipeline_parallel_size"} == {*SAME_OPTIONS.values()}


@pytest.mark.parametrize("word", ["—prompt", "－－prompt", "–prompt"])
def test_dash_that_is_no_hyphen_is_named(word):
    with pytest.raises(
        UserError, match=f"unknown option {word}: it begins with a typographic dash; options begin with two hyphens"
    ):
        split_command([word, "Hello"])
    with pytest.raises(UserError, match=f"unknown option {word}"):
        split_command(["serve", word, "8001"])
    with pytest.raises(UserError, match=f"unknown option {word}"):
        build_parser().parse_args(["--model", "demo", word, "Hello"])


def test_short_option_may_be_joined_to_its_value():
    assert build_parser().parse_args(["-qint8"]).quantization == "int8"


def test_model_after_the_command_leads_to_its_flag():
    with pytest.raises(UserError, match="serve: unexpected 'DIR'; to choose a model, use --model DIR"):
        split_command(["serve", "DIR", "-tp", "2"])


def test_text_without_a_flag_leads_to_it():
    with pytest.raises(UserError, match="to run a prompt, use --prompt '17 [+] 25 = [?]'$"):
        split_command(["17 + 25 = ?", "--temperature", "0"])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("n 3 is more than num_beams 2", "--n 3 is more than --num-beams 2"),
        ("stop: a string must have 1 to 100 characters", "--stop: a string must have 1 to 100 characters"),
        ("early_stopping must be true", "early_stopping must be true"),
    ],
)
def test_messages_on_sampling_name_flags(message, expected):
    assert as_flags(message) == expected


def test_wrong_flag_is_a_usage_error_without_importing_torch():
    code = (
        "import sys\nfrom labinfer.cli.main import main\nstatus = main(['--modle', 'x', '--seed', '1'])\n"
        "print('torch' in sys.modules)\nraise SystemExit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.strip() == "False"
    assert done.stderr.startswith("labinfer: error: ") and "--modle" in done.stderr and done.stderr.count("\n") == 1
