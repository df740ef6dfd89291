"""A job on terminals of 80 and of 40 columns: its live lines never reach the last column, where a terminal begins a new row."""

from __future__ import annotations

import json
import re
import sys

import pytest
from launchers import LAUNCH
from pseudo_terminal import pseudo_terminal

from labinfer.observe.table import display_width

NUM_LINES = 40


@pytest.mark.parametrize("columns", [80, 40])
def test_live_lines_of_a_job_fit_the_terminal(columns, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = json.dumps({"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True})
    source.write_text(f"{line}\n" * NUM_LINES)
    flags = ["--input", str(source), "--output", str(output), "--threads", "1", "--log-level", "warning"]
    with pseudo_terminal([sys.executable, LAUNCH, *flags], tmp_path, columns=columns) as terminal:
        assert terminal.wait(120) == 0
        raw = "".join(piece for _, piece in terminal.pieces).replace("\r\n", "\n")
    live = [text for text in re.findall(r"\r([^\r\n]+)", raw) if not text.startswith(("labinfer: ", "\x1b[K"))]
    assert [text for text in live if display_width(text) >= columns] == []
    assert any(f"/{NUM_LINES} lines done" in text for text in live) and any("importing torch" in text for text in live)
    assert len(output.read_text().splitlines()) == NUM_LINES
