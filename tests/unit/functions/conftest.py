"""Fixtures of the functions' tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def calls(monkeypatch):
    """Names of the operators of the stand-in for torch_npu that a test has called."""
    import stub_torch_npu as ops

    names = []

    def record(name, operator):
        def call(*arguments, **named):
            names.append(name)
            return operator(*arguments, **named)

        return call

    for name in ops.__all__:
        if name.startswith("npu_"):
            monkeypatch.setattr(ops, name, record(name, getattr(ops, name)))
    return names
