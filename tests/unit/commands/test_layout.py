"""``plan`` of a layout whose draft model has a rank of its own."""

from __future__ import annotations

import json

import pytest

from labinfer.cli import main
from labinfer.commands import layout

CAPTURED = layout.CAPTURED_BYTES
SPECULATION = json.dumps({"model": "demo", "draft_rank": 2})


@pytest.mark.parametrize(("free", "status"), [(CAPTURED + (4 << 20), 1), (CAPTURED + (64 << 20), 0)])
def test_draft_model_that_is_too_large_for_its_rank_is_told(free, status, monkeypatch, capfd):
    """The draft model has 5.6 MiB of weights, each of the two stages 1.1."""
    monkeypatch.setattr(layout, "free_memory", lambda device: 3 * free)
    flags = ["--model", "demo-draft", "-pp", "2", "--ranks", "0,1", "--speculative-config", SPECULATION]
    assert main(["plan", *flags, "--threads", "1"]) == status
    complaints = [line for line in capfd.readouterr().out.splitlines() if "has no room" in line]
    assert len(complaints) == status
    for line in complaints:
        assert line.startswith("rank 2 has no room: ") and line.endswith(
            "choose another draft_rank, or a smaller draft model"
        )
