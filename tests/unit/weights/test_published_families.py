"""Families whose projections are fused, or whose layers keep a state, in published formats: the oracle's weights on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import make_checkpoint
from published_formats import LINEARS, PUBLISHED, write_published
from published_models import RANKS, matrices, values
from tiny_llama import model_of

from labinfer.functions.cpu.loading import CpuLoading
from labinfer.models.families.layers.latent_attention import HeadWeights
from labinfer.models.registry import load_config, model_class
from labinfer.weights.loader import check_checkpoint, load_weights
from labinfer.weights.model_files import open_model

FAMILIES = {
    "phi3": (*LINEARS, "qkv_proj", "gate_up_proj"),
    "qwen3.5": (*LINEARS, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "qwen3-next-moe": (*LINEARS, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "deepseek-v3": (*LINEARS, "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    "qwen2-tied": LINEARS,
}
"""The linear layers of each, as its checkpoints name them."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return request.param, make_checkpoint(tmp_path_factory.mktemp("family") / "model", request.param)


def load(directory, rank: int, size: int, compiled, **options):
    """A rank's share of any family, after the check of the whole."""
    config, checkpoint = load_config(directory), open_model(directory).open_weights()
    checkpoint.functions = CpuLoading(compiled)
    names = model_class(config).names
    with torch.device("meta"):
        whole = model_of(config, names=names, **options)
        model = model_of(config, names=names, tp_rank=rank, tp_size=size, **options)
    check_checkpoint(whole, checkpoint, config.tied_embeddings)
    load_weights(model, checkpoint, torch.device("cpu"), lambda done, total: None)
    return model


def head_weights(model) -> dict[str, torch.Tensor]:
    """Weights of latents, which are decoded whatever they are stored in."""
    return {name: module.weight for name, module in model.named_modules() if isinstance(module, HeadWeights)}


@pytest.mark.each_value
@pytest.mark.parametrize(
    "name",
    [
        "gptq-asym",
        "awq",
        "fp8",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("w4a16-channel", "fp8-mistral")),
    ],
)
def test_fused_and_hybrid_layers_hold_the_oracles_weights(family, compiled_functions, tmp_path, name):
    kind, plain = family
    published = replace(PUBLISHED[name], linears=FAMILIES[kind])
    directory = tmp_path / "model"
    directory.mkdir()
    for path in plain.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    write_published(directory, tmp_path / "twin", published)
    for rank, size in RANKS:
        wanted = matrices(load(tmp_path / "twin", rank, size, compiled_functions))
        held = matrices(load(directory, rank, size, compiled_functions))
        if published.form:
            assert any(hasattr(block.packed, "scales") for matrix in held.values() for block in matrix._blocks)
        for path, matrix in held.items():
            assert torch.equal(values(matrix), values(wanted[path])), (rank, size, path)
        exact, decoded = (
            head_weights(load(folder, rank, size, compiled_functions)) for folder in (tmp_path / "twin", directory)
        )
        assert exact.keys() == decoded.keys() and len(exact) == 4 * (kind == "deepseek-v3")
        assert all(torch.equal(exact[path], decoded[path]) for path in exact), (rank, size)
