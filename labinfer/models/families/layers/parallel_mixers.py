"""``ParallelMixers``: attention and Mamba-2 of equal inputs in one layer, whose outputs are added (Falcon-H1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from labinfer.functions.attention_batch import Angles
from labinfer.functions.calls import FunctionCall
from labinfer.functions.layer_cache import LayerCache
from labinfer.models.families.layers.mamba import MambaConfig, MambaState
from labinfer.models.layers.attention import AttentionConfig
from labinfer.models.layers.cache_spec import CacheSpec
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows
from labinfer.models.layers.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class ParallelMixersConfig:
    """Unsharded layer, ``attention_scale * attention(x) + mamba_scale * mamba(x)``."""

    attention: AttentionConfig
    mamba: MambaConfig
    attention_scale: float = 1.0
    mamba_scale: float = 1.0

    @property
    def rope(self) -> RopeConfig | None:
        """Rotary config of the attention."""
        return self.attention.rope

    def build(self, hidden_size: int, ctx: StageContext) -> ParallelMixers:
        return ParallelMixers(self, hidden_size, ctx)

    def with_window(self, window: int) -> ParallelMixersConfig:
        return replace(self, attention=self.attention.with_window(window))

    def check(self, tp_size: int) -> None:
        self.attention.check(tp_size)
        self.mamba.check(tp_size)


class ParallelMixers(nn.Module):
    """This rank's heads of both mixers; each has its own all-reduce."""

    def __init__(self, config: ParallelMixersConfig, hidden_size: int, ctx: StageContext):
        super().__init__()
        self.rope = config.rope
        self.attention = config.attention.build(hidden_size, ctx)
        self.mamba = config.mamba.build(hidden_size, ctx)
        self._attention_scale, self._mamba_scale = (
            torch.tensor(scale, dtype=torch.float32, device="cpu")
            for scale in (config.attention_scale, config.mamba_scale)
        )
        """Tensors, so that captured steps can replay the products."""

    def cache_spec(self) -> CacheSpec:
        attention, mamba = self.attention.cache_spec(), self.mamba.cache_spec()

        def view(**pools: torch.Tensor) -> tuple[LayerCache, MambaState]:
            states = {name: pools.pop(name) for name in mamba.per_sequence}
            return attention.view(**pools), mamba.view(**states)

        return replace(attention, view=view, per_sequence=mamba.per_sequence)

    def calls(self) -> Iterator[FunctionCall]:
        """None of its own: both mixers list theirs."""
        return iter(())

    def forward(
        self,
        x_TD: torch.Tensor,
        batch: ModelInputBatch,
        cache: tuple[Any, MambaState],
        angles: Angles | None,
        output_rows: OutputRows | None = None,
    ) -> torch.Tensor:
        """(T, D) → (T, D), or (R, D) for ``output_rows``; writes keys and values, and updates the state of each sequence."""
        attention_TD = self.attention(x_TD, batch, cache[0], angles, output_rows) * self._attention_scale
        return attention_TD + self.mamba(x_TD, batch, cache[1], None, output_rows) * self._mamba_scale
