"""A small Llama whose matrices are stored in a published format, one rank's share of it, and what its matrices hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from published_formats import PUBLISHED, write_published
from tiny_llama import model_of, write

from labinfer.functions.cpu.loading import CpuLoading
from labinfer.functions.reference.quantized import dequantize
from labinfer.models.layers.matrix import Matrix
from labinfer.models.registry import load_config
from labinfer.weights.checkpoint import CheckpointReader
from labinfer.weights.loader import load_weights, weight_slices
from labinfer.weights.model_files import open_model

SHAPE = {
    "hidden_size": 160,
    "intermediate_size": 11 * 128,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 1,
}
"""11 groups of 128 inputs, which neither 2 nor 3 ranks divide, and inputs that are no multiple of a group."""
RANKS = [(rank, size) for size in (1, 2, 3) for rank in range(size)]


def check_slices(model, checkpoint: CheckpointReader) -> None:
    for part in weight_slices(model):
        checkpoint.check(part)


def load(directory, rank: int = 0, size: int = 1, compiled=None, **options):
    """A rank's share, checked first.

    Args:
        compiled: the library whose functions for loading are taken; torch's by default.
    """
    config, checkpoint = load_config(directory), open_model(directory).open_weights()
    if compiled is not None:
        checkpoint.functions = CpuLoading(compiled)
    model = model_of(config, tp_rank=rank, tp_size=size, **options)
    check_slices(model, checkpoint)
    load_weights(model, checkpoint, torch.device("cpu"), lambda done, total: None)
    return model


def matrices(model) -> dict[str, Matrix]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Matrix)}


def values(matrix: Matrix) -> torch.Tensor:
    """The weights that a matrix holds, packed by the reference."""
    blocks = [block.packed for block in matrix._blocks]
    return torch.cat([dequantize(packed) if hasattr(packed, "scales") else packed.data for packed in blocks])


def forms(model) -> set[tuple[int, int, bool] | None]:
    """The forms of blocks inside the layers."""
    blocks = (block.packed for name, matrix in matrices(model).items() if "layers" in name for block in matrix._blocks)
    return {(one.bits, one.group, one.zeros is not None) if hasattr(one, "scales") else None for one in blocks}


def published_pairs(tmp_path_factory, shape: dict) -> Callable[[str], tuple[Path, Path]]:
    """A function of a format's name: (quantised checkpoint, plain checkpoint of the same values), made when it is first asked."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            directory = tmp_path_factory.mktemp("checkpoints") / name
            directory.mkdir()
            write(directory, **shape)
            write_published(directory, directory.parent / "twin", PUBLISHED[name])
            made[name] = directory, directory.parent / "twin"
        return made[name]

    return make
