"""``--weights packed12`` on two ranks: the text and the table of plain weights, from fewer bytes."""

from __future__ import annotations

import re
import shutil

import pytest
from checkpoints import make_checkpoint

from labinfer.native import compiler

FLAGS = (
    "--prompt",
    "x",
    "--raw",
    "--max-tokens",
    "12",
    "--ignore-eos",
    "--dtype",
    "bfloat16",
    "--threads",
    "1",
    "--log-level",
    "info",
)


@pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")
@pytest.mark.parametrize("launcher, layout", [("torchrun", "-tp"), ("mpirun", "-pp")])
def test_two_ranks_give_the_text_of_plain_weights(tmp_path, launches, launcher, layout):
    flags = ["--model", make_checkpoint(tmp_path / "model", "llama-untied"), *FLAGS, "--no-autotune", layout, "2"]
    done = {weights: launches.run(launcher, 2, *flags, "--weights", weights) for weights in ("plain", "packed12")}
    assert done["plain"].returncode == 0 and done["plain"].stdout.strip(), done["plain"].text
    assert done["packed12"].stdout == done["plain"].stdout, done["packed12"].text
    held = {weights: weight_sizes(run.text) for weights, run in done.items()}
    assert len(held["plain"]) == 2 and all(
        few < many for few, many in zip(*map(held.get, ("packed12", "plain")), strict=True)
    )


def weight_sizes(text: str) -> list[float]:
    """KiB of weights on each rank, from the table of a start."""
    found = re.findall(r"^ +\d+ .* bfloat16 +([\d.]+) ([KM])iB", text, re.MULTILINE)
    return [float(size) * (1024 if unit == "M" else 1) for size, unit in found]
