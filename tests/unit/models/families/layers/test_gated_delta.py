"""Gated DeltaNet: which rows of a checkpoint's tensors each rank holds, and what it keeps for a sequence."""

from __future__ import annotations

import pytest
import torch

from labinfer.base.errors import UserError
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.launch.providers import reference_registry
from labinfer.models.families.layers.gated_delta import GatedDeltaConfig, GatedDeltaNet
from labinfer.models.layers.context import StageContext
from labinfer.weights.loader import weight_slices
from labinfer.weights.slices import MatrixSlice

SHAPE = {
    "num_key_heads": 16,
    "num_value_heads": 32,
    "key_size": 4,
    "value_size": 6,
    "conv_width": 4,
    "norm_eps": 1e-6,
}


def layer(rank: int, size: int, **changes) -> GatedDeltaNet:
    context = StageContext(
        tp=TensorParallelCommunicator(LocalCommunicator(rank=rank, size=size)),
        functions=reference_registry().select(torch.device("cpu"), torch.float32),
        dtype=torch.float32,
        first_layer=0,
        last_layer=1,
        is_first=True,
        is_last=True,
    )
    return GatedDeltaConfig(**SHAPE | changes).build(8, context)


def rows(model: GatedDeltaNet, name: str) -> list[tuple[int, int]]:
    return [
        part.rows for part in weight_slices(model) if isinstance(part, MatrixSlice) and part.name.lstrip(".") == name
    ]


def test_uneven_ranks_hold_whole_key_heads_with_their_value_heads():
    models = [layer(rank, 3) for rank in range(3)]
    specs = [model.cache_spec().per_sequence for model in models]
    assert [spec["delta"].shape for spec in specs] == [(12, 4, 6), (10, 4, 6), (10, 4, 6)]
    assert [spec["conv"].shape for spec in specs] == [(3, 6 * 8 + 72), (3, 5 * 8 + 60), (3, 5 * 8 + 60)]
    assert rows(models[1], "in_proj_qkv") == [(24, 44), (64 + 24, 64 + 44), (128 + 72, 128 + 132)]
    assert rows(models[1], "in_proj_z") == [(72, 132)]
    assert rows(models[1], "in_proj_b") == rows(models[1], "in_proj_a") == [(12, 22)]


@pytest.mark.parametrize("size", [1, 3, 20])
def test_rows_stored_by_key_head_are_those_of_a_checkpoint_with_parts(size):
    """With 20 ranks some value heads share a key head with another rank's."""
    parts = torch.arange(2 * 64 + 2 * 192).split((64, 64, 192, 192))
    heads = [part.view(16, -1) for part in parts]
    by_key_head = torch.cat(heads, dim=1).flatten()
    gates = torch.arange(64).view(2, 16, 2)  # b and a of each key head's value heads
    gates_by_key_head = gates.transpose(0, 1).flatten()
    for rank in range(size):
        apart, together = layer(rank, size), layer(rank, size, stored_by_key_head=True)

        def gather(model, stored: dict[str, torch.Tensor], module: str) -> list[int]:
            names = [name for name, _, _ in getattr(model, module)._parts]
            ranges = [range_ for _, _, range_ in getattr(model, module)._parts]
            return [row for name, (begin, end) in zip(names, ranges, strict=True) for row in stored[name][begin:end]]

        split = {"in_proj_qkv": torch.cat(parts[:3]), "in_proj_z": parts[3]}
        assert gather(apart, split, "in_proj") == gather(together, {"in_proj_qkvz": by_key_head}, "in_proj")
        split = {"in_proj_b": gates[0].flatten(), "in_proj_a": gates[1].flatten()}
        assert gather(apart, split, "gates") == gather(together, {"in_proj_ba": gates_by_key_head}, "gates")


def test_more_ranks_than_value_heads_are_refused():
    with pytest.raises(UserError, match="--tensor-parallel-size 33 is more than the model's 32 value heads"):
        GatedDeltaConfig(**SHAPE).check(33)
