"""``plan`` of layouts that just have room or just have none: stages in one memory, and a draft model on a rank of its own."""

from __future__ import annotations

import json

import pytest

from labinfer.cli.commands import layout
from labinfer.cli.main import main

CAPTURED = layout.CAPTURED_BYTES
SPECULATION = json.dumps({"model": "demo", "draft_rank": 2})


@pytest.mark.parametrize(("free", "status"), [(CAPTURED + (4 << 20), 1), (CAPTURED + (64 << 20), 0)])
def test_draft_model_that_is_too_large_for_its_rank_is_told(free, status, monkeypatch, capfd):
    """The draft model has 5.6 MiB of weights, each of the two stages 1.1."""
    monkeypatch.setattr(layout, "free_memory", lambda device, given=0: 3 * free)
    flags = ["--model", "demo-draft", "-pp", "2", "--ranks", "0,1", "--speculative-config", SPECULATION]
    assert main(["plan", *flags, "--threads", "1"]) == status
    complaints = [line for line in capfd.readouterr().out.splitlines() if "has too little memory" in line]
    assert len(complaints) == status
    for line in complaints:
        assert line.startswith("rank 2 has too little memory: ") and line.endswith(
            "choose another draft_rank, or a smaller draft model"
        )


@pytest.mark.parametrize(("free", "status"), [(CAPTURED + (7 << 19), 0), (CAPTURED + (2 << 20), 1)])
def test_stages_in_one_memory_have_room_together(free, status, monkeypatch, capfd):
    """Five layers take more than half of the memory, one takes less."""
    monkeypatch.setattr(layout, "free_memory", lambda device, given=0: 2 * free)
    assert main(["plan", "--model", "demo", "--layers", "5,1", "--threads", "1"]) == status
    lines = capfd.readouterr().out.splitlines()
    (num_blocks,) = (int(line.split()[2]) for line in lines if line.startswith("KV cache: "))
    complaints = [line for line in lines if " too little memory: " in line]
    assert bool(num_blocks) == (not status) and len(complaints) == status
    for line in complaints:
        assert (
            line.startswith("ranks 0-1 have too little memory: ")
            and "its share" not in line
            and "their share" not in line
        )


ROWS = [
    (rank, "node1", "cuda:0", 0, rank, "10-20", "bfloat16", "512.5 MiB", "12.0 KiB", 1048576, "-", "-")
    for rank in range(2)
]


def test_table_without_recurrent_states_fits_eighty_columns():
    lines = layout.format_layout(ROWS).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].endswith("KV tokens") and len(lines) == 2 + len(ROWS)


def test_table_of_int8_layers_on_one_host_fits_eighty_columns():
    rows = [(*row[:6], "bfloat16, int8", *row[7:]) for row in ROWS]
    lines = layout.format_layout(rows).splitlines()
    assert max(map(len, lines)) <= 80 and "node1" not in lines[2]


def test_table_has_columns_of_states_if_one_rank_has_recurrent_layers():
    other = (1, "node2", *ROWS[1][2:-2], "109.7 KiB", 8)
    lines = layout.format_layout([("demo", *ROWS[0]), ("other", *other)], ("model",)).splitlines()
    assert lines[0].split() == " ".join(("model", *layout.HEADER)).split()
    assert lines[2].split()[-2:] == ["-", "-"] and lines[3].split()[-3:] == ["109.7", "KiB", "8"]
