"""``--plugin`` through the public door: on every rank, in every command, and what is wrong with a plugin in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from documents import python_block
from launchers import BIN, LAUNCH, LAUNCHERS, environment, finish, matrix, run, start

import labinfer
from labinfer.launch.portable import TORCH_CAPABILITY
from labinfer.native.targets import PORTABLE
from labinfer.native.torch_instructions import MKL_COMPATIBLE, mkl_branch

POLICY = """from labinfer import register

@register("scheduling_policy", "mine")
def mine(sequence, running_of_user):
    return (sequence.order,)
"""
COMMAND = """import dataclasses
from labinfer import register
from labinfer.base.plugins import PLUGINS
from labinfer.base.config import ParallelOptions, RuntimeOptions
from labinfer.base.option_fields import option

@dataclasses.dataclass(frozen=True, kw_only=True)
class CountOptions:
    \"\"\"What is counted.\"\"\"
    word: str = option("ranks", "the word to print", metavar="TEXT")

@register("command", "count", help="count the ranks", options=(CountOptions, ParallelOptions, RuntimeOptions))
def count(session, options):
    group = session.join()
    if group.rank == 0:
        print(group.size, options[0].word, *PLUGINS.identities())
    group.close()
    return 0
"""
INSTRUCTIONS = """import torch
from labinfer import register
from labinfer.base.config import ModelOptions, ParallelOptions, RuntimeOptions
from labinfer.native.torch_instructions import torch_instructions

torch.ones(4096).exp()

@register("command", "instructions", help="tell them", options=(ModelOptions, ParallelOptions, RuntimeOptions))
def tell(session):
    group = session.join()
    if group.rank == 0:
        print(torch_instructions())
    group.close()
    return 0
"""
LINK = """from pathlib import Path
from labinfer import register
from labinfer.weights.hugging_face.directory import HuggingFaceDirectory

@register("model_files", "link")
class Link(HuggingFaceDirectory):
    def __init__(self, path):
        super().__init__(Path(path.read_text()))
"""
PROMPT = ("--prompt", "17 + 25 = ?", "--dtype", "float32")


def write(folder, name: str, text: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(text)
    return str(path)


def errors(launcher: str, *flags: str, ranks: int = 2, **env: str) -> list[str]:
    """Error lines of a start that is refused."""
    done = run(launcher, ranks, LAUNCH, *flags, *(("-pp", "2") if ranks == 2 else ()), **env)
    assert done.returncode in ((1, 2) if launcher == "torchrun" else (2,)), done.text
    assert "Traceback" not in done.own_stderr, done.text
    return done.our_errors


def test_plugin_reads_a_model_from_files_of_its_own_kind(tmp_path):
    model, demo = tmp_path / "model.link", Path(labinfer.__file__).parent / "assets" / "demo"
    model.write_text(str(demo))
    flags = ("--plugin", write(tmp_path, "link", LINK), "--model", str(model), "--tokenizer", str(demo))
    done = run(LAUNCHERS[0], 2, LAUNCH, "-pp", "2", *flags, *PROMPT)
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.text


@pytest.mark.skipif(not PORTABLE.runs_here() or mkl_branch() is None, reason="it needs AVX2, and MKL in torch")
@pytest.mark.parametrize("written", [("--reproducible", "any-cpu"), ("--reproducible=any-cpu",)])
def test_any_cpu_is_set_before_a_plugin_computes(tmp_path, written):
    named = ("--plugin", write(tmp_path, "telling", INSTRUCTIONS))
    done = run(LAUNCHERS[0], 2, LAUNCH, "instructions", *named, *written)
    assert (done.returncode, done.stdout) == (0, f"torch with {TORCH_CAPABILITY}, MKL {MKL_COMPATIBLE}\n"), done.text


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_plugin_is_chosen_by_name_on_two_ranks(launcher, tmp_path):
    flags = ("--plugin", write(tmp_path, "own", POLICY), "--scheduling-policy", "mine", "-pp", "2", *PROMPT)
    done = run(launcher, 2, LAUNCH, *flags)
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.text


@pytest.mark.parametrize(("launcher",), matrix(("mpirun",)))
def test_plugin_may_be_a_command(launcher, tmp_path):
    done = run(launcher, 2, LAUNCH, "count", "--plugin", write(tmp_path, "counting", COMMAND), "--word", "there")
    assert done.returncode == 0 and done.stdout.startswith("2 there counting@"), done.text


def test_plugin_of_the_documentation(tmp_path):
    path = write(tmp_path, "longest_first", python_block("docs/extending.md", "def longest_first"))
    done = run("single", 1, LAUNCH, "--plugin", path, "--scheduling-policy", "longest_first", *PROMPT)
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.text


def test_help_shows_what_a_plugin_adds(tmp_path):
    silent = COMMAND.replace('"count", help="count the ranks"', '"tally"')
    texts = {"counting": COMMAND, "silent": silent, "own": POLICY}
    flags = [word for name, text in texts.items() for word in ("--plugin", write(tmp_path, name, text))]
    shown = run("single", 1, LAUNCH, *flags, "--help").stdout
    assert "launch.py count" in shown and "launch.py tally" in shown
    assert "fcfs|priority|fair|mine" in run("single", 1, LAUNCH, *flags, "--help-all").stdout
    assert "the word to print" in run("single", 1, LAUNCH, "count", *flags, "--help").stdout
    assert run("single", 1, LAUNCH, "--help").stdout.count("mine") == 0  # nothing is loaded unasked


BROKEN = {
    "missing": (None, "cannot be read: No such file or directory"),
    "raises": ("x = 1\nassert x == 2, 'x is wrong'\n", "line 2: AssertionError: x is wrong"),
    "syntax": ("def f(:\n", "line 1: SyntaxError"),
    "twice": (POLICY + POLICY, "the name is already registered by twice; choose another one"),
    "shipped": (POLICY.replace("mine", "fcfs"), "the name is already registered as shipped with LABInfer"),
    "kind": (POLICY.replace("scheduling", "schedule"), "unknown kind; kinds: scheduling_policy"),
    "nothing": ("x = 1\n", "registers nothing"),
}


@pytest.mark.parametrize("launcher", ["single", *(pytest.param(name, marks=pytest.mark.slow) for name in LAUNCHERS)])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_plugin_ends_the_start_in_one_line(name, launcher, tmp_path):
    text, expected = BROKEN[name]
    path = str(tmp_path / f"{name}.py") if text is None else write(tmp_path, name, text)
    (line,) = errors(launcher, "--plugin", path, *PROMPT, ranks=1 if launcher == "single" else 2)
    assert expected in line and name in line, line


@pytest.mark.parametrize(("launcher",), matrix(("torchrun",)))
def test_plugin_that_raises_on_one_rank_ends_all(launcher, tmp_path):
    rank = "PMI_RANK" if launcher == "mpirun" else "RANK"
    text = f"import os\nassert os.environ[{rank!r}] != '1', 'not here'\n" + POLICY
    (line,) = errors(launcher, "--plugin", write(tmp_path, "picky", text), *PROMPT)
    assert line.startswith("labinfer: error: rank 1 on ") and line.endswith("line 2: AssertionError: not here"), line


@pytest.mark.parametrize("content, expected", [("# other\n" + POLICY, "has another version"), (None, "has no module")])
def test_module_that_differs_between_ranks_is_refused(content, expected, tmp_path):
    """Each rank looks for modules in a folder of its own, as if it were on another machine."""
    script = tmp_path / "on_two_machines.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path[:0] = [{str(tmp_path)!r} + '/node' + os.environ['PMI_RANK'], {str(LAUNCH.removesuffix('launch.py'))!r}]\n"
        "from labinfer.cli.main import run_program\nrun_program()\n"
    )
    for rank, text in enumerate((POLICY, content)):
        (folder := tmp_path / f"node{rank}").mkdir()
        if text is not None:
            write(folder, "shared_ideas", text)
    done = run("mpirun", 2, str(script), "--plugin", "shared_ideas", *PROMPT, "-pp", "2")
    (line,) = done.our_errors
    assert done.returncode == 2 and "rank 1 on " in line and expected in line, done.text


def test_job_is_not_resumed_with_another_version(tmp_path):
    given, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps({"prompt": f"{i} + 1 = ?", "max_tokens": 2}) + "\n" for i in range(2)))
    job = ("--input", str(given), "--output", str(answers))
    plugin = write(tmp_path, "own", POLICY)
    assert run("single", 1, LAUNCH, *job, "--plugin", plugin).returncode == 0
    assert run("single", 1, LAUNCH, *job, "--plugin", plugin, "--resume").returncode == 0
    write(tmp_path, "own", POLICY + "# changed\n")
    (line,) = errors("single", *job, "--plugin", plugin, "--resume", ranks=1)
    assert "was started with other options: --plugin was own@" in line, line
    (line,) = errors("single", *job, "--resume", ranks=1)
    assert "--plugin was own@" in line and "and is not there" in line, line


def test_python_api_loads_plugins(tmp_path):
    write(tmp_path, "own", POLICY)
    code = f"""
from labinfer import LLM, UserError
llm = LLM(plugins=[{str(tmp_path / "own.py")!r}], scheduling_policy="mine", dtype="float32")
print(llm.options.scheduler.scheduling_policy)
try:
    LLM(plugins=["no_such_plugin"])
except UserError as error:
    print(error)
try:
    LLM(plugins="one.py")
except UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=LAUNCH.removesuffix("launch.py"),
    )
    first, second, third = done.stdout.splitlines()
    assert first == "mine" and "no_such_plugin" in second and "must be a list" in third, done


@pytest.mark.parametrize(
    "command", [("plan",), ("bench", "latency", "--batch-size", "1", "--num-iters", "1", "--output-len", "4")]
)
def test_plugin_works_in_other_commands(command, tmp_path):
    flags = ("--plugin", write(tmp_path, "own", POLICY), "--scheduling-policy", "mine")
    done = run("single", 1, LAUNCH, *command, *flags)
    assert done.returncode == 0, done.text
    without = run("single", 1, LAUNCH, *command, *flags[2:])
    assert "choose one of fcfs, priority, fair" in without.our_errors[0]


@pytest.mark.parametrize(("launcher",), matrix(("torchrun",)))
def test_error_of_a_command_that_rank_0_runs_alone_is_one_line(launcher, tmp_path):
    plugin, cluster = write(tmp_path, "own", POLICY), str(tmp_path / "none.json")
    done = run(launcher, 2, LAUNCH, "simulate", "--cluster", cluster, "--plugin", plugin, timeout=60)
    assert done.returncode in (1, 2) and "Traceback" not in done.own_stderr
    (line,) = done.our_errors
    assert cluster in line


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_different_plugins_are_refused(rank, tmp_path):
    """One of two ranks is given no plugin, as by a command that was typed on each machine."""
    plugin = ("--plugin", write(tmp_path, "own", POLICY))
    flags = [[*(() if number == rank else plugin), *PROMPT, "-pp", "2"] for number in range(2)]
    words = ["-n", "1", sys.executable, LAUNCH]
    command = [str(BIN / "mpirun"), *words, *flags[0], ":", *words, *flags[1]]
    done = finish(start(command), 60)
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.text
    assert any("rank 1 on " in line and "give the same to all ranks" in line for line in done.our_errors), done.text


SINK = """import os
from labinfer import register
from labinfer.worker.step_sink import StepSink

@register("step_sink", "odd")
class Odd(StepSink):
    def __init__(self, argument, place):
        super().__init__(argument, place)
        if argument == "raise" and place.rank == 1:
            raise OSError("no room")

    def write(self, step):
        if step.step_id == 0:
            with open(f"{self.argument}.{self.place.rank}", "w") as file:
                file.write("written")

    def close(self):
        raise OSError("cannot close")
"""


def test_sink_that_cannot_be_made_on_one_rank_ends_all_in_one_line(tmp_path):
    (line,) = errors("mpirun", "--plugin", write(tmp_path, "odd", SINK), "--step-sink", "odd=raise", *PROMPT)
    assert "rank 1 on " in line and "odd.py, line 10: OSError: no room" in line, line


def test_several_sinks_are_written_and_one_that_cannot_close_is_named(tmp_path):
    sinks = (f"--step-sink=odd={tmp_path / 'a,b'}", f"--step-sink=odd={tmp_path / 'c'}")
    done = run("single", 1, LAUNCH, "--plugin", write(tmp_path, "odd", SINK), *sinks, *PROMPT)
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.text
    assert (tmp_path / "a,b.0").read_text() == (tmp_path / "c.0").read_text() == "written"
    assert done.stderr.count("the step sink Odd failed to close: OSError('cannot close')") == 2
