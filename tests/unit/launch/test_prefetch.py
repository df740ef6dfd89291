"""Starts that read the model's files early, and those that cannot know which they need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labinfer.base.config import EngineOptions
from labinfer.comm.spmd.environment import detect
from labinfer.launch import prefetch
from labinfer.launch.prefetch import prefetch_weights


@pytest.mark.parametrize(
    ("world_size", "local_world_size", "layout", "reads"),
    [
        (1, 1, "", True),
        (1, 1, "auto", True),
        (2, 2, "", True),
        (2, 2, "auto", False),
        (2, 2, "plan.json", False),
        (4, 2, "", False),
    ],
)
def test_files_are_read_where_all_are_needed_on_this_node(monkeypatch, world_size, local_world_size, layout, reads):
    calls: list[str] = []
    monkeypatch.setattr(prefetch, "start_reading_ahead", lambda model, *others, **named: calls.append(model))
    environment = replace(detect(), world_size=world_size, local_world_size=local_world_size)
    prefetch_weights(environment, EngineOptions.from_flat({"model": "demo", "layout": layout or None}))
    assert calls == ["demo"] * reads
