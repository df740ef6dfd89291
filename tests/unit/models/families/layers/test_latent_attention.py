"""Layers of latent attention with the sizes of published models: both forms of attention give the same outputs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from published_configs import PUBLISHED
from tiny_llama import plain_slices

from labinfer.comm.local import LocalCommunicator
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.latent_cache import LatentCache
from labinfer.launch.providers import reference_registry
from labinfer.models.families.layers.latent_attention import LatentAttentionConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch
from labinfer.models.layers.rope import RotaryTable
from labinfer.models.registry import load_config
from labinfer.weights.loader import pack_weights

CPU, BLOCK, POSITIONS = torch.device("cpu"), 16, 64
HIDDEN, MOST_HEADS = 64, 20  # in which published layers are smaller here; a head's own sizes are as published
TABLES = ([5, 2, 7], [0, 3])
STEPS = (((0, 33),), ((33, 34), (0, 30)))
"""For each step the positions of each sequence's new tokens: a prompt, then a decode beside another prompt."""
MODELS = {
    "deepseek-ai/DeepSeek-V2-Lite": "queries of the hidden state itself",
    "deepseek-ai/DeepSeek-V3": "queries of a vector of their own, sharpened by YaRN",
    "zai-org/GLM-4.7-Flash": "values wider than the part of keys without position",
    "openbmb/MiniCPM3-4B": "smaller latents, longrope",
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_absorbed_and_expanded_layer_agree(name, interleaved, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = load_config(tmp_path).layers[0].mixer
    rope = replace(config.rope, interleaved=interleaved)
    config = replace(config, num_heads=min(config.num_heads, MOST_HEADS), rope=rope)
    absorbed_TD, expanded_TD = (run_layer(config, form) for form in ("absorbed", "expanded"))
    assert (absorbed_TD - expanded_TD).abs().max() < 1e-5 * expanded_TD.abs().max()
    assert not torch.equal(absorbed_TD, expanded_TD)  # they are two computations


def run_layer(config: LatentAttentionConfig, form: str) -> torch.Tensor:
    """Outputs of all steps, by a layer with random weights that are the same for every form."""
    torch.manual_seed(0)
    context = StageContext(
        tp=TensorParallelCommunicator(LocalCommunicator()),
        functions=reference_registry().select(CPU, torch.float32, {"latent_attention": form}),
        dtype=torch.float32,
        first_layer=0,
        last_layer=1,
        is_first=True,
        is_last=True,
    )
    layer = config.build(HIDDEN, context)
    for part in plain_slices(layer):
        is_norm = len(part.shape) == 1
        part.destination.normal_(1.0, 0.3) if is_norm else part.destination.normal_(0.0, part.shape[1] ** -0.5)
    pack_weights(layer)
    latent = torch.full((8, BLOCK, config.rank + config.rope.dim), torch.nan)  # what is not written must not be read
    cache = LatentCache(latent=latent, latent_scale=None, rank=config.rank)
    angles, outputs = RotaryTable(config.rope, POSITIONS, torch.float32, CPU), []
    angles.cover(POSITIONS)
    for ranges in STEPS:
        batch = make_batch(ranges)
        x_TD = torch.randn(len(batch.positions_T), HIDDEN)
        outputs.append(layer(x_TD, batch, cache, angles.at(batch.positions_T)))
    return torch.cat(outputs)


def make_batch(ranges: tuple[tuple[int, int], ...]) -> ModelInputBatch:
    """New tokens of the first sequences, from one position up to another."""
    positions = [torch.arange(begin, end) for begin, end in ranges]
    slots = [torch.tensor(TABLES[b])[own // BLOCK] * BLOCK + own % BLOCK for b, own in enumerate(positions)]
    lengths = [end for _, end in ranges]
    tables = [table[: -(-end // BLOCK)] for table, end in zip(TABLES, lengths, strict=False)]
    row_ptr = [0, *torch.tensor([len(own) for own in positions]).cumsum(0).tolist()]
    return ModelInputBatch(
        token_ids_T=torch.cat(positions),
        positions_T=torch.cat(positions),
        attention=AttentionBatch.build(row_ptr, lengths, tables, CPU),
        slots_T=torch.cat(slots),
        sample_rows_B=torch.tensor([row_ptr[-1] - 1]),
        prompt_rows=[],
        pooled=[],
    )
