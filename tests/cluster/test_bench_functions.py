"""``launch.py bench functions`` from end to end."""

from __future__ import annotations

import json
import shutil

import pytest

from labinfer.functions.autotune import TIMED_ROWS
from labinfer.native.compiler import COMPILERS

PRODUCTS = {"layer.linear", "vocabulary.linear", "paged_attention"}
compiled = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="no C++ compiler, so no roofline limits either"
)


@compiled
@pytest.mark.parametrize(
    ("launcher", "ranks", "flags"),
    [("single", 1, ["--quantization", "int8"]), ("mpirun", 2, ["-tp", "2", "--dtype", "bfloat16"])],
)
def test_every_function_is_in_the_table_with_its_roofline_limits_and_drawn(
    launcher, ranks, flags, model, launches, tmp_path
):
    pytest.importorskip("matplotlib")
    file, chart = tmp_path / "figures.json", tmp_path / "roofline.svg"
    flags = [*flags, "--output-json", file, "--plot", chart]
    done = launches.run(launcher, ranks, "bench", "functions", "--model", model, *flags)
    assert done.returncode == 0, done.text
    assert chart.read_bytes().startswith(b"<?xml")
    found = json.loads(file.read_text())
    assert found["roofline_limits"]["memory"] > 1e8 and found["roofline_limits"]["float32"] > 1e8
    figures = found["figures"]
    lines = done.stdout.splitlines()
    functions = {one["function"] for one in figures}
    assert lines[0].startswith("roofline limits (")
    limits = found["workload_limits"]
    assert list(limits) == (["W1", "W2", "W3"] if ranks == 1 else [])
    assert [line.split(" (")[0] for line in lines[1 : 1 + len(limits)]] == [f"limit of {name}" for name in limits]
    assert all(limit > 0 for limit in limits.values())
    assert len(lines) == 1 + len(limits) + 4 * len(functions) + len(figures), (
        "before the rows: a gap, a title, the header and its rule"
    )
    assert functions == PRODUCTS | {"add_rms_norm", "silu_and_mul", "rotate_and_write"}
    for one in figures:
        assert one["rows"] in TIMED_ROWS and one["seconds"] > 0 and one["memory"] > 0
        assert (one["arithmetic"] > 0) == (one["function"] in PRODUCTS)
    for function in functions:  # a run takes one at each number of rows
        chosen = [one["rows"] for one in figures if one["function"] == function and one["is_chosen"]]
        assert chosen == list(TIMED_ROWS)
