"""A quantised checkpoint under real launchers: its values' text from two ranks of either kind, and its layout beforehand."""

from __future__ import annotations

import re

import pytest
from checkpoints import make_checkpoint
from launchers import Finished
from published_formats import PUBLISHED, write_published

FLAGS = ("--prompt", "x", "--raw", "--max-tokens", "12", "--ignore-eos", "--dtype", "float32", "--threads", "1")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("quantised") / "model", "llama-untied")
    write_published(directory, directory.parent / "twin", PUBLISHED["gptq-asym"])
    return str(directory), str(directory.parent / "twin")


@pytest.fixture(scope="module")
def alone(checkpoints, launches) -> dict[str, Finished]:
    """What one rank says of the values, and of the layout of two ranks."""
    quantised, twin = checkpoints
    plan = ["plan", "--model", quantised, "-tp", "2", "--dtype", "float32"]
    cases = {"text": ["--model", twin, *FLAGS], "no room": [*plan, "--num-kv-blocks", "100000000000"]}
    cases |= {name: [*plan, "--num-kv-blocks", "10", "--quantization", name] for name in ("auto", "none")}
    return {name: launches.run("single", 1, *arguments) for name, arguments in cases.items()}


@pytest.mark.parametrize(("launcher", "layout"), [("torchrun", ("-tp", "2")), ("mpirun", ("-pp", "2"))])
def test_two_ranks_give_the_text_of_the_values(launcher, layout, checkpoints, alone, launches):
    run = ["--model", checkpoints[0], *FLAGS, *layout]
    decoded, held = launches.run(launcher, 2, *run, "-q", "none"), launches.run(launcher, 2, *run)
    assert alone["text"].returncode == 0 and alone["text"].stdout.strip(), alone["text"].text
    assert decoded.stdout == alone["text"].stdout, decoded.text
    assert held.returncode == 0 and held.stdout.strip(), held.text


def test_plan_counts_codes(alone):
    weights = []
    for quantization in ("auto", "none"):
        done = alone[quantization]
        assert done.returncode == 0, done.text
        lines = [re.split(" {2,}", line.strip()) for line in done.stdout.splitlines()]
        header = next(line for line in lines if line[:2] == ["rank", "device"])
        rows = [dict(zip(header, line, strict=False)) for line in lines if line[0] in ("0", "1")]
        assert [row["dtype"] for row in rows] == ["float32, gptq" if quantization == "auto" else "float32"] * 2
        sizes = [row["weights"].split() for row in rows]
        weights.append([float(size) for size, _ in sizes])
        assert all(unit == "KiB" for _, unit in sizes)

    assert all(held < 0.9 * decoded for held, decoded in zip(*weights, strict=True))


def test_plan_of_a_layout_that_has_no_room_ends_with_1_and_the_sums(alone):
    done = alone["no room"]
    assert done.returncode == 1, done.text
    (complaint,) = (line for line in done.stdout.splitlines() if "have too little memory: " in line)
    assert complaint.startswith("ranks 0-1 have too little memory: ")
    assert "of weights and at least" in complaint and "are free on cpu" in complaint
