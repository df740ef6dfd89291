"""What tests of captured steps have in common: families, and a model whose steps are run as they are, then captured."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import FAMILIES, make_checkpoint

from labinfer import LLM
from labinfer.worker.step_graphs import CapturedStep, StepGraphs

UNCAPTURED = {"ministral3", "olmo3", "minimax-m2"}
"""Families whose layers have something between functions that a graph cannot repeat."""


def families(sample: Container[tuple[str, str]]) -> pytest.MarkDecorator:
    """Parameters ``kind`` and ``dtype`` of a test; those that are not in the sample are slow."""
    kinds = ("qwen2-windows", "llama-untied", *FAMILIES)
    cases = [(kind, dtype) for kind in kinds for dtype in ("bfloat16", "float32")]
    marked = [pytest.param(*case, marks=() if case in sample else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize(("kind", "dtype"), marked)


@contextmanager
def launch(directory: Path, kind: str, dtype: str, threads: int) -> Iterator[LLM]:
    """A model of a family with small blocks and functions that are not measured."""
    options = {"num_kv_blocks": 200, "block_size": 4, "enable_prefix_caching": False, "autotune": False}
    with LLM(str(make_checkpoint(directory / "model", kind)), dtype=dtype, threads=threads, **options) as llm:
        yield llm


def without_and_with_capture(llm: LLM) -> Iterator[None]:
    """Twice: steps run in Python, then they are captured anew."""
    runner = llm._parts.worker.runner
    parts = [runner._layers, runner._head]
    capture = runner._layers._capture
    assert capture is not None
    for chosen in (None, capture):
        for part in parts:
            part._capture = chosen
            part._steps.clear()
        yield


def captured_rows(graphs: StepGraphs) -> set[int]:
    """Rows of the steps that are replayed as one."""
    return {rows for (_, rows, *_), step in graphs._steps.items() if isinstance(step, CapturedStep)}
