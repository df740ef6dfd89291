"""Protocols of the two parts of a decoder layer: the mixer, which exchanges information between tokens (attention), and the MLP.

A config describes a part and builds it, so a model may mix kinds of layers, and a new kind is one file. A layer declares itself what
it keeps between steps (``cache_spec``) and which functions it calls (``calls``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from labinfer.functions.attention_batch import Angles
from labinfer.functions.calls import FunctionCall
from labinfer.models.layers.cache_spec import CacheSpec
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows
from labinfer.models.layers.rope import RopeConfig


class Mixer(Protocol):
    """Mixer of one layer on this rank: attention, or another module that combines tokens; an ``nn.Module``."""

    rope: RopeConfig | None
    """Rotary config of the ``angles`` that ``forward`` takes; None if it needs none."""

    def cache_spec(self) -> CacheSpec:
        """Tensors that the mixer keeps between steps."""
        ...

    def calls(self) -> Iterator[FunctionCall]:
        """Function calls that the mixer makes for every batch, except those of its matrices and norms."""
        ...

    def __call__(
        self,
        x_TD: torch.Tensor,
        batch: ModelInputBatch,
        cache: Any,
        angles: Angles | None,
        output_rows: OutputRows | None = None,
    ) -> torch.Tensor:
        """(T, D) → (T, D), or (R, D) for ``output_rows``; summed over the TP ranks.

        Args:
            output_rows: rows to compute; None for all. All tokens are written to the cache in either case.
            cache: result of ``cache_spec().view``.
            angles: rotary angles of ``rope``.
        """
        ...


class MixerConfig(Protocol):
    """Unsharded shape of a mixer."""

    def build(self, hidden_size: int, ctx: StageContext) -> nn.Module:
        """Build this rank's share of the mixer, a ``Mixer``."""
        ...

    def with_window(self, window: int) -> MixerConfig:
        """The config with a sliding window of ``window`` tokens, if the mixer supports windows."""
        ...

    def check(self, tp_size: int) -> None:
        """Check that the mixer can be sharded over ``tp_size`` ranks.

        Raises:
            UserError: it cannot.
        """
        ...


class MLPConfig(Protocol):
    """Unsharded shape of an MLP. A module that counts the tokens of each expert stores the counts in ``num_tokens_E``."""

    has_experts: ClassVar[bool]
    """Whether the MLP has routed experts."""
    reads_hidden: ClassVar[bool]
    """Whether ``forward`` also takes the hidden states before the norm, (T, D)."""
    num_sums: ClassVar[int]
    """Number of all-reduces in ``forward``."""

    def build(self, hidden_size: int, ctx: StageContext) -> nn.Module:
        """Build this rank's part of the MLP: (T, D) → (T, D), summed over the TP ranks."""
        ...
