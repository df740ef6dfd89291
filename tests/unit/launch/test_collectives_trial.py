"""Trial of collectives with processes that do not end well: what the first one found is kept."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from labinfer.launch import collectives_trial
from labinfer.launch.collectives_trial import make_finding, try_collectives
from labinfer.launch.json_child import JsonChild

CHILD = """
import json, os, sys, time

rank = json.load(sys.stdin)["rank"]
if rank == 0:
    os.write(1, bytes.fromhex({output!r}) + b"\\n")
{end}
"""


@pytest.mark.parametrize(
    ("end", "verdict", "detail"),
    [
        ("time.sleep(1000 * rank)", "hangs", "no end within 3 s"),
        ("sys.exit('no such card' if rank else 0)", "crashes", "exit codes 0 and 1 no such card"),
    ],
)
def test_what_rank_0_found_is_kept(monkeypatch, tmp_path: Path, end: str, verdict: str, detail: str):
    found = make_finding("all_reduce", "gloo", torch.float32, "works")
    output = collectives_trial.msgspec.json.encode(found).hex()
    (tmp_path / "collectives_child.py").write_text(CHILD.format(output=output, end=end))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(collectives_trial, "JsonChild", lambda module, request: JsonChild("collectives_child", request))
    monkeypatch.setattr(collectives_trial, "LIMIT", 3.0)
    begin = time.monotonic()
    first, last = try_collectives("cpu")
    assert first == found and (last.verdict, last.detail) == (verdict, detail)
    assert time.monotonic() - begin < 6  # one deadline for both processes
