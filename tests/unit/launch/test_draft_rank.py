"""KV blocks of a draft model on a rank of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.spmd.devices import DeviceName
from labinfer.launch import draft_rank
from labinfer.launch.draft_rank import build_draft_rank

BLOCK = 1 << 20
USEFUL = 40


def num_blocks(monkeypatch, *, free: int, mapped: int = 0, **cache) -> int:
    """Blocks that the draft model gets of so many MiB, two of which its states take; a stage shares them."""
    blocks: list[int] = []
    model = SimpleNamespace(
        state_bytes=2 << 20,
        block_bytes=BLOCK,
        layout=SimpleNamespace(useful_blocks=lambda max_num_seqs: USEFUL, least_blocks=1),
        make_cache=lambda count, *_: blocks.append(count),
    )
    monkeypatch.setattr(draft_rank, "load_draft_model", lambda *_, **named: model)
    monkeypatch.setattr(draft_rank, "free_memory", lambda device, given=0: 2 * free << 20)
    build_draft_rank(
        SimpleNamespace(rank=2, everyone=[], environment=SimpleNamespace(model_dir="")),
        EngineOptions.from_flat({"speculative_config": {"model": "small", "draft_rank": 2}, **cache}),
        SimpleNamespace(draft_devices={2: DeviceName("cpu")}, sharing_device=lambda rank, everyone: 2),
        None,
        providers=[],
        weight_cache=SimpleNamespace(mapped_bytes=lambda: mapped << 20),
    )
    return blocks[0]


def test_mapped_weights_are_not_free(monkeypatch):
    given = {"free": 32, "memory_utilization": 0.5}
    assert num_blocks(monkeypatch, **given) == 15
    assert num_blocks(monkeypatch, mapped=20, **given) == 5
    with pytest.raises(UserError, match=r"too little memory for a KV cache \(0 MiB free\)"):
        num_blocks(monkeypatch, mapped=40, **given)


def test_blocks_that_are_asked_for_must_fit(monkeypatch):
    assert num_blocks(monkeypatch, free=32, num_kv_blocks=30) == 30
    assert num_blocks(monkeypatch, free=42, num_kv_blocks=99) == 99  # it makes no more than are useful
    with pytest.raises(
        UserError, match="--num-kv-blocks 31 needs 31 MiB for the draft model small, but 30 MiB are free"
    ):
        num_blocks(monkeypatch, free=32, num_kv_blocks=31)
