"""Choosing implementations at the start of a run, through ``LLM``."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from labinfer import LLM, SamplingParams
from labinfer.functions import autotune
from labinfer.functions.cpu import library
from labinfer.launch import tune
from labinfer.native import compiler


@pytest.fixture
def said(tmp_path, monkeypatch):
    """What is said about functions; with a cache of its own for the times, the library is where it always is."""
    built = tune.cache_folder()
    compiled = library.build
    monkeypatch.setattr(library, "build", lambda *_, **__: compiled(built))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("labinfer.launch.tune")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def answer(**options) -> str:
    with LLM(threads=1, **options) as llm:
        chat = [[{"role": "user", "content": "What is 17 + 25?"}]]
        return llm.generate(chat, SamplingParams(max_tokens=8))[0].text


def test_measured_once_and_then_remembered(said, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "MAX_SPREAD", math.inf)  # whether or not this machine is idle
    try:
        library.build(tmp_path)
    except compiler.NoCompiler:
        pytest.skip("no C++ compiler, so there is nothing to choose")
    assert answer() == answer() == "42"
    assert len(said) == 2 and "measured in" in said[0] and "cached timings" in said[1]
    assert said[0].split(":")[1] == said[1].split(":")[1]  # the same choice
    for name in ("linear", "vocabulary.linear"):
        assert f" {name} " in said[0]
    kept = list((tmp_path / ".cache" / "labinfer").glob("times-*.json"))
    assert len(kept) == 1
    kept[0].write_text("{")
    assert answer() == "42"
    assert "measured in" in said[2] and len(said) == 3
    assert answer(autotune="again") == "42"
    assert "measured in" in said[3] and len(said) == 4


@pytest.mark.parametrize("options", [{"autotune": False}, {"functions": "reference"}, {"dtype": "float32"}])
def test_where_nothing_is_to_be_chosen_nothing_is_measured(said, tmp_path, options):
    assert answer(**options) == "42"
    assert said == [] and not list(tmp_path.rglob("times-*.json"))
