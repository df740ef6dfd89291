"""Bad input: one line that says what was wrong and what to do, on every launcher, fast, with no traceback and no hang."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from launchers import BIN, LAUNCH, Finished, command, finish, run, start

LIMIT_SECONDS = 10
START_SECONDS = 30
"""Limit for importing modules and meeting, also where others want the cores."""
EXIT_USAGE = 2
ONE_LINE = '{"prompt": "hello"}\n'


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    """Broken copies of a good checkpoint, and input files."""
    folder = tmp_path_factory.mktemp("bad")
    good = Path(model)
    for name in ("broken-header", "missing-tensor", "unknown-architecture", "no-config", "broken-config"):
        shutil.copytree(good, folder / name)
    weights = folder / "broken-header" / "model.safetensors"
    weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
    (folder / "no-config" / "config.json").unlink()
    (folder / "broken-config" / "config.json").write_text("{")
    config = json.loads((good / "config.json").read_text())
    (folder / "unknown-architecture" / "config.json").write_text(
        json.dumps(config | {"architectures": ["GPT2LMHeadModel"]})
    )
    more_layers = {"num_hidden_layers": 5, "layer_types": [*config["layer_types"], "full_attention"]}
    (folder / "missing-tensor" / "config.json").write_text(json.dumps(config | more_layers))
    (folder / "one.jsonl").write_text(ONE_LINE)
    (folder / "a-file").write_text("not a directory")
    return folder


CASES = {
    "too many ranks": (3, "good", ["-tp", "2", "-pp", "1"], "the layout -tp 2 -pp 1 needs 2 ranks, but there are 3"),
    "too few ranks": (2, "good", ["-tp", "2", "-pp", "2"], "needs 4 ranks, but there are 2"),
    "more stages than layers": (
        5,
        "good",
        ["-pp", "5"],
        "--pipeline-parallel-size 5 is more than the model's 4 layers",
    ),
    "layers do not add up": (2, "good", ["--layers", "3,3"], "--layers 3,3 adds up to 6, but the model has 4 layers"),
    "more tp than heads": (1, "good", ["-tp", "15"], "needs 15 ranks"),
    "unknown architecture": (2, "unknown-architecture", [], "architecture 'GPT2LMHeadModel' is not supported"),
    "broken safetensors header": (2, "broken-header", [], "is not a valid safetensors file"),
    "missing tensor": (2, "missing-tensor", [], "has no tensor model.layers.4."),
    "no config": (2, "no-config", [], "config.json: No such file or directory"),
    "broken config": (2, "broken-config", [], "is not valid JSON"),
    "no such model": (2, "nowhere", [], "was not found; tried: directory"),
    "model is a file": (2, "a-file", [], "is a file; give the directory"),
    "no such device": (2, "good", ["--device", "npu"], "--device npu: torch"),
    "wrong dtype": (2, "good", ["--dtype", "float13"], "--dtype float13: choose one of"),
    "dtypes for another number of stages": (
        2,
        "good",
        ["--dtype", "float32,float32,float32"],
        "has 3 values for 2 stages",
    ),
    "context too long": (
        2,
        "good",
        ["--max-model-len", "100000"],
        "--max-model-len 100000 exceeds the model's maximum of 512",
    ),
    "not a number": (2, "good", ["--max-num-seqs", "many"], "--max-num-seqs must be a whole number, not 'many'"),
    "unknown flag": (2, "good", ["--pipline-parallel-size", "2"], "did you mean --pipeline-parallel-size?"),
    "no room for the KV cache": (2, "good", ["--num-kv-blocks", "100000000000"], "--num-kv-blocks 100000000000 needs"),
}


def check_refusal(done, message: str) -> None:
    assert done.returncode != 0
    assert done.seconds_after_first_line < LIMIT_SECONDS, f"took {done.seconds_after_first_line:.1f} s"
    assert done.seconds < START_SECONDS + LIMIT_SECONDS, f"took {done.seconds:.1f} s"
    assert len(done.our_errors) == 1, done.text
    assert message in done.our_errors[0]
    assert "Traceback" not in done.own_stderr, done.own_stderr


JOB_CASES = {
    "missing input": (["--input", "{folder}/none.jsonl"], "cannot read --input"),
    "input is a directory": (["--input", "{folder}"], "is a directory; give a JSONL file"),
    "unwritable output": (
        ["--input", "{folder}/one.jsonl", "--output", "{folder}/no/such/out.jsonl"],
        "cannot write --output",
    ),
    "output is the input": (["--input", "{folder}/one.jsonl", "--output", "{folder}/one.jsonl"], "is the --input file"),
    "unwritable report": (["--prompt", "hello", "--report", "{folder}/no/such/report.json"], "cannot write --report"),
    "report is the output": (
        ["--input", "{folder}/one.jsonl", "--output", "{folder}/same", "--report", "{folder}/same"],
        "is the --output file",
    ),
    "report is the input": (["--input", "{folder}/one.jsonl", "--report", "{folder}/one.jsonl"], "is the --input file"),
    "trace is the output": (
        ["--input", "{folder}/one.jsonl", "--output", "{folder}/same", "--trace", "{folder}/same"],
        "is the --trace file; give another one",
    ),
    "not Unicode": (["--prompt", os.fsdecode(b"a\xff")], "the text is not valid Unicode"),
    "input name not Unicode": (["--input", os.fsdecode(b"/tmp/\xff")], "cannot read --input"),
    "name too long": (["--input", "x" * 5000], "File name too long"),
    "endless timeout": (["--prompt", "hello", "--timeout", "inf"], "--timeout must be a finite number, not inf"),
    "full disk": (
        ["--input", "{folder}/one.jsonl", "--output", "/dev/full"],
        "cannot write --output /dev/full: No space",
    ),
    "neither prompt nor input": ([], "give either --prompt TEXT or --input FILE"),
    "empty prompt": (["--prompt", ""], "--prompt is empty"),
    "prompt too long": (["--prompt", "9 " * 600], "maximum context length is"),
    "bad temperature": (["--prompt", "hello", "--temperature", "-1"], "error: --temperature must be from 0 to 100"),
}


TORCHRUN_SAMPLE = ("broken safetensors header",)
MPIRUN_SAMPLE = ("too many ranks",)
"""What has a launch of its own; the others follow one another in ``refused_together``, and have theirs in the full matrix."""
PARAMETERS = [
    pytest.param(name, launcher, marks=[] if name in sample else [pytest.mark.slow])
    for launcher, sample in (("mpirun", MPIRUN_SAMPLE), ("torchrun", TORCHRUN_SAMPLE))
    for name in CASES
]
TOGETHER = [name for name, (ranks, *_) in CASES.items() if ranks == 2]
KEPT = "missing tensor"
"""Refused late, and given an output that is there already and is to be overwritten."""


def flags_of_case(name: str, folder: Path, model: str) -> list[str]:
    """All but ``--output``."""
    if name in JOB_CASES:
        return ["--model", model, *(flag.format(folder=folder) for flag in JOB_CASES[name][0])]
    _, checkpoint, flags, _ = CASES[name]
    path = model if checkpoint == "good" else str(folder / checkpoint)
    return ["--model", path, "--input", str(folder / "one.jsonl"), *flags]


@pytest.fixture(scope="module")
def refused_together(folder, model, launches, tmp_path_factory) -> dict[str, Finished]:
    """How each command ends, of many that two ranks are given one after another."""
    outputs = {name: tmp_path_factory.mktemp("out") / "out.jsonl" for name in TOGETHER}
    outputs[KEPT].write_text("precious\n")
    cases = {name: flags_of_case(name, folder, model) for name in [*TOGETHER, *JOB_CASES]}
    for name, out in outputs.items():
        cases[name] += ["--output", str(out)]
    cases[KEPT].append("--overwrite")
    ended = {name: launches.run("mpirun", 2, *arguments) for name, arguments in cases.items()}
    assert outputs.pop(KEPT).read_text() == "precious\n", "a job that never starts keeps the old output"
    assert all(not out.exists() or out.read_bytes() == b"" for out in outputs.values())
    assert (folder / "one.jsonl").read_text() == ONE_LINE
    return ended


@pytest.mark.parametrize("name", ["missing input", "unwritable output", "report is the output"])
def test_files_are_refused_before_the_ranks_meet(name, refused_together):
    done = refused_together[name]
    assert "transport" not in done.text
    assert done.text.count("\n") == 1, done.text


@pytest.mark.parametrize("name", [*TOGETHER, *JOB_CASES])
def test_one_after_another_is_refused_with_one_line(name, refused_together):
    done = refused_together[name]
    check_refusal(done, (CASES.get(name) or JOB_CASES[name])[-1])
    assert done.returncode == EXIT_USAGE


@pytest.mark.parametrize(("name", "launcher"), PARAMETERS)
def test_refused_with_one_line(name, launcher, folder, model, tmp_path):
    ranks, _, _, message = CASES[name]
    out = tmp_path / "out.jsonl"
    done = run(launcher, ranks, LAUNCH, *flags_of_case(name, folder, model), "--output", out)
    check_refusal(done, message)
    assert not out.exists() or out.read_bytes() == b""
    if launcher == "mpirun":
        assert done.returncode == EXIT_USAGE


@pytest.mark.slow
@pytest.mark.parametrize("name", JOB_CASES)
def test_job_refused_with_one_line(name, folder, model):
    done = run("mpirun", 2, LAUNCH, *flags_of_case(name, folder, model))
    check_refusal(done, JOB_CASES[name][1])
    assert done.returncode == EXIT_USAGE
    assert (folder / "one.jsonl").read_text() == ONE_LINE


def test_a_tp_group_across_nodes_names_the_nodes(folder, model):
    arguments = ["--model", model, "--input", str(folder / "one.jsonl"), "-tp", "2"]
    program = command("single", 1, LAUNCH, *arguments)
    on_a = ["-n", "1", "-env", "LABINFER_NODE_NAME", "node-a", *program]
    on_b = ["-n", "1", "-env", "LABINFER_NODE_NAME", "node-b", *program]
    done = finish(start([str(BIN / "mpirun"), *on_a, ":", *on_b]), 60)
    check_refusal(
        done,
        "--tensor-parallel-size 2 needs 2 ranks on one node for stage 0, but it has rank 0 on node-a, rank 1 on node-b",
    )


def test_mpirun_of_another_mpi_is_named(folder, model):
    """What Open MPI's mpirun leaves in the environment, before a Python whose mpi4py uses MPICH."""
    env = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    env = {f"OMPI_COMM_WORLD_{name}": value for name, value in env.items()}
    done = run("single", 1, LAUNCH, "--model", model, "--input", folder / "one.jsonl", **env)
    check_refusal(done, "this mpirun is from Open MPI, but mpi4py of this Python uses MPICH")
