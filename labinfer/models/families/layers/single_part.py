"""``SinglePartLayer``: a decoder layer with one norm, and either a mixer or an MLP (Nemotron-H)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from labinfer.functions.attention_batch import Angles
from labinfer.functions.calls import FunctionCall
from labinfer.models.config import LayerConfig, ModelConfig
from labinfer.models.decoder import DecoderLayer, NormPlacement, make_norm
from labinfer.models.families.layers.ungated_mlp import UngatedMLP
from labinfer.models.layers.cache_spec import CacheSpec
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows


@dataclass(frozen=True, kw_only=True)
class NoMixerConfig:
    """Mixer of a layer that has only an MLP."""

    def build(self, hidden_size: int, ctx: StageContext) -> NoMixer:
        return NoMixer()

    def with_window(self, window: int) -> NoMixerConfig:
        return self

    def check(self, tp_size: int) -> None:
        """Any number of ranks is possible."""


class NoMixer(nn.Module):
    """A mixer without weights and cache, which is never called."""

    rope = None

    def cache_spec(self) -> CacheSpec:
        return CacheSpec(view=lambda: None)

    def calls(self) -> Iterator[FunctionCall]:
        return iter(())


@dataclass(frozen=True, kw_only=True)
class NoMLPConfig:
    """MLP of a layer that has only a mixer."""

    has_experts: ClassVar[bool] = False
    reads_hidden: ClassVar[bool] = False
    num_sums: ClassVar[int] = 0

    def build(self, hidden_size: int, ctx: StageContext) -> nn.Module:
        return nn.Module()


@dataclass(frozen=True, kw_only=True)
class SquaredReluMLPConfig:
    """Unsharded MLP of a layer without mixer, ``down(relu(up(x)) ** 2)`` (So et al. 2021, arXiv:2109.08668)."""

    intermediate_size: int
    bias: bool = False
    has_experts: ClassVar[bool] = False
    reads_hidden: ClassVar[bool] = False
    num_sums: ClassVar[int] = 0
    """The layer's only all-reduce, as one is counted for the mixer of every layer."""

    def build(self, hidden_size: int, ctx: StageContext) -> SquaredReluMLP:
        return SquaredReluMLP(self.intermediate_size, hidden_size, ctx, bias=self.bias)


class SquaredReluMLP(UngatedMLP):
    """This rank's columns of the MLP."""

    def activate(self, x_TF: torch.Tensor) -> torch.Tensor:
        return squared_relu(x_TF)


def squared_relu(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``relu(x) ** 2``, in the dtype of ``x``."""
    out = x.new_empty(x.shape) if out is None else out
    if has_torch_function((x,)):  # a capture records this as one torch operation
        return handle_torch_function(squared_relu, (x,), x, out)
    torch.clamp(x, min=0, out=out)
    return out.mul_(out)


squared_relu.repeats_in_place = True


class SinglePartLayer(DecoderLayer):
    """Norm, then a mixer or an MLP, whichever the layer has."""

    def __init__(self, layer: LayerConfig, config: ModelConfig, placement: NormPlacement, ctx: StageContext):
        nn.Module.__init__(self)
        self.input_layernorm = make_norm(config, ctx)
        self.self_attn = layer.mixer.build(config.hidden_size, ctx)
        self.mlp = layer.mlp.build(config.hidden_size, ctx)
        self._has_mixer = not isinstance(layer.mixer, NoMixerConfig)

    def forward(
        self,
        hidden_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        batch: ModelInputBatch,
        cache: Any,
        angles: Angles | None,
        *,
        output_rows: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``DecoderLayer.forward`` with one part."""
        hidden_TD, x_TD = self.input_layernorm(hidden_TD, delta_TD)
        if self._has_mixer:
            delta_TD = self.self_attn(x_TD, batch, cache, angles, output_rows)
            return (hidden_TD if output_rows is None else hidden_TD[output_rows.rows_R]), delta_TD
        if output_rows is not None:
            hidden_TD, x_TD = hidden_TD[output_rows.rows_R], x_TD[output_rows.rows_R]
            if not len(hidden_TD):
                return hidden_TD, x_TD
        return hidden_TD, self.mlp(x_TD)
