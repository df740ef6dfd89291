"""A family that no checkpoint has: layers of three kinds, two of which keep something that attention does not.

It is registered as a plugin is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from checkpoints import write_tokenizer
from safetensors.torch import save_file
from torch import nn

from labinfer import register
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.spmd.topology import shard_range
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.functions.calls import FunctionCall
from labinfer.functions.layer_cache import TokenPool
from labinfer.launch.providers import reference_registry
from labinfer.models.config import LayerConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.decoder import Decoder
from labinfer.models.layers.cache_spec import CacheSpec, StateTensor, TokenTensor
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from labinfer.models.layers.rope import RopeConfig
from labinfer.models.layers.sharding import shard_columns
from labinfer.models.registry import load_config
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.loader import weight_slices
from labinfer.weights.slices import MatrixSlice

LATENT, ROTATED = 10, 6
DECAY = 0.9


@dataclass(frozen=True, kw_only=True)
class DecayConfig:
    """``s = 0.9 s + in(x)``, ``out(s)``: one vector for each sequence, however long it is."""

    width: int

    def build(self, hidden_size, ctx):
        return Decay(self, hidden_size, ctx)

    def with_window(self, window):
        return self

    def check(self, tp_size):
        pass


@dataclass(frozen=True)
class DecayState:
    sums: torch.Tensor
    """(slots, width)."""


class Decay(nn.Module):
    rope = None

    def __init__(self, config: DecayConfig, hidden_size, ctx):
        super().__init__()
        columns = shard_columns(config.width, ctx.tp.size, ctx.tp.rank)
        self._width = columns[1] - columns[0]
        self.in_proj = MergedColumnParallelLinear(hidden_size, [("in_proj", config.width, columns)], False, ctx)
        self.out_proj = RowParallelLinear(config.width, columns, hidden_size, False, ctx)

    def cache_spec(self) -> CacheSpec:
        return CacheSpec(view=DecayState, per_sequence={"sums": StateTensor(shape=(self._width,))})

    def calls(self) -> Iterator[FunctionCall]:
        yield from ()

    def forward(self, x_TD, batch, cache: DecayState, angles, output_rows=None):
        assert angles is None
        x_TF, attention = self.in_proj(x_TD), batch.attention
        out_TF = torch.empty_like(x_TF)
        for b, slot in enumerate(attention.state_slots_B.tolist()):
            begin, end = attention.row_ptr[b], attention.row_ptr[b + 1]
            is_new = attention.context_lens[b] == end - begin
            sum_F = torch.zeros_like(cache.sums[slot]) if is_new else cache.sums[slot].clone()
            for row in range(begin, end):
                sum_F = DECAY * sum_F + x_TF[row]
                out_TF[row] = sum_F
            cache.sums[slot] = sum_F
        return self.out_proj(out_TF if output_rows is None else out_TF[output_rows.rows_R])


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Attention whose heads share one vector for each token, a part of which is rotated (as in arXiv:2405.04434)."""

    num_heads: int
    rope: RopeConfig

    def build(self, hidden_size, ctx):
        return Latent(self, hidden_size, ctx)

    def with_window(self, window):
        return self

    def check(self, tp_size):
        assert tp_size <= self.num_heads


@dataclass(frozen=True)
class LatentCache:
    latent: torch.Tensor
    """(blocks, block size, LATENT + ROTATED)."""
    latent_scale: torch.Tensor | None = None
    age: torch.Tensor | None = None
    """(blocks, block size): something that is never rounded, to see that it moves along."""


class Latent(nn.Module):
    def __init__(self, config: LatentConfig, hidden_size, ctx):
        super().__init__()
        self.rope, size = config.rope, LATENT + ROTATED
        heads = shard_range(config.num_heads, ctx.tp.size)[ctx.tp.rank]
        self._num_heads = heads[1] - heads[0]
        queries = ("q_proj", config.num_heads * size, (heads[0] * size, heads[1] * size))
        self.q_proj = MergedColumnParallelLinear(hidden_size, [queries], False, ctx)
        self.kv_proj = MergedColumnParallelLinear(hidden_size, [("kv_proj", size, (0, size))], False, ctx)
        columns = (heads[0] * LATENT, heads[1] * LATENT)
        self.out_proj = RowParallelLinear(config.num_heads * LATENT, columns, hidden_size, False, ctx)

    def cache_spec(self) -> CacheSpec:
        latent = TokenTensor(shape=(LATENT + ROTATED,), rope=self.rope, rope_begin=LATENT)
        return CacheSpec(
            view=LatentCache, per_token={"latent": latent, "age": TokenTensor(shape=(), dtype=torch.float32)}
        )

    def calls(self) -> Iterator[FunctionCall]:
        yield from ()

    def forward(self, x_TD, batch, cache: LatentCache, angles, output_rows=None):
        q_THR = self.q_proj(x_TD).view(len(x_TD), self._num_heads, -1)
        kv_TR = self.kv_proj(x_TD)
        q_THR = torch.cat((q_THR[..., :LATENT], turn(q_THR[..., LATENT:], *angles)), dim=-1)
        kv_TR = torch.cat((kv_TR[:, :LATENT], turn(kv_TR[:, None, LATENT:], *angles)[:, 0]), dim=-1)
        pool = TokenPool(cache.latent, cache.latent_scale)
        pool.store(kv_TR, batch.slots_T)
        cache.age.flatten()[batch.slots_T] = batch.positions_T.float() + 1
        attention, out_TF = batch.attention, []
        for b, length in enumerate(attention.context_lens):
            rows = slice(attention.row_ptr[b], attention.row_ptr[b + 1])
            blocks = attention.tables_N[attention.table_ptr[b] : attention.table_ptr[b + 1]].long()
            seen_SR = pool.load(blocks, x_TD.dtype)[:length]
            assert cache.age[blocks].flatten()[:length].gt(0).all(), "a token's entry was not written"
            scores_HTS = torch.einsum("thr,sr->hts", q_THR[rows], seen_SR) / (LATENT + ROTATED) ** 0.5
            num_new = rows.stop - rows.start
            hidden = torch.ones(num_new, length, dtype=torch.bool).triu(length - num_new + 1)
            weights_HTS = scores_HTS.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            out_TF.append(torch.einsum("hts,sr->thr", weights_HTS, seen_SR[:, :LATENT]).flatten(1))
        out_TF = torch.cat(out_TF)
        return self.out_proj(out_TF if output_rows is None else out_TF[output_rows.rows_R])


def turn(x_THR, cos_TR, sin_TR):
    low, high = x_THR.chunk(2, dim=-1)
    return x_THR * cos_TR[:, None] + torch.cat((-high, low), dim=-1) * sin_TR[:, None]


@register("model_family", "ToyForCausalLM")
class ToyForCausalLM(Decoder):
    """Layers of three kinds in turn, so that stages differ in what a token and a sequence take."""

    @classmethod
    def read_config(cls, file):
        kinds = file.get("kinds", list)
        mixers = {
            "decay": DecayConfig(width=40),
            "latent": LatentConfig(num_heads=5, rope=read_rope(file, dim=ROTATED)),
            "attention": read_attention(file),
        }
        mlp = read_gated_mlp(file)
        return read_model(file, [LayerConfig(mixer=mixers[kind], mlp=mlp) for kind in kinds])


CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}


def write_toy(directory: Path, kinds: list[str]) -> Path:
    """A checkpoint with random weights, and a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"kinds": kinds, "num_hidden_layers": len(kinds)}))
    config, tp = load_config(directory), TensorParallelCommunicator(LocalCommunicator(rank=0, size=1))
    functions = reference_registry().select(torch.device("cpu"), torch.float32)
    context = StageContext(
        tp=tp,
        functions=functions,
        dtype=torch.float32,
        first_layer=0,
        last_layer=len(kinds),
        is_first=True,
        is_last=True,
    )
    generator, tensors = torch.Generator().manual_seed(3), {}
    for part in weight_slices(ToyForCausalLM(config, context)):
        if isinstance(part, MatrixSlice):
            tensors[f"{part.name}.weight"] = torch.randn(part.outputs, part.inputs, generator=generator) * 0.2
        else:
            tensors[part.name] = 1 + 0.3 * torch.randn(part.shape, generator=generator)
    save_file(tensors, directory / "model.safetensors")
    write_tokenizer(directory)
    return directory
