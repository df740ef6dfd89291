"""Protocols for the two parts of a decoder's layer: the mixer, in which tokens see each other, and the MLP.

A config says what a part is like and builds it, so that a model's layers may be of different kinds and a new kind is one
file. A layer answers for itself: what it keeps between steps (``cache_spec``), and which functions it calls (``calls``).
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
    """This rank's share of one layer's attention, or of what stands in its place. An ``nn.Module``."""

    rope: RopeConfig | None
    """The rotary table whose angles ``forward`` is given; None where it has no use for one."""

    def cache_spec(self) -> CacheSpec:
        """Tensors that it keeps between steps."""
        ...

    def calls(self) -> Iterator[FunctionCall]:
        """Calls of functions that it makes for every batch, but for those of its matrices and norms."""
        ...

    def __call__(
        self,
        x_TD: torch.Tensor,
        batch: ModelInputBatch,
        cache: Any,
        angles: Angles | None,
        output_rows: OutputRows | None = None,
    ) -> torch.Tensor:
        """(T, D) → (T, D), or (R, D) of the rows that are asked for; the sum over the ranks.

        Args:
            output_rows: None for all. Whatever they are, all tokens go into the cache.
            cache: what ``cache_spec().view`` made of its pools.
            angles: of the table in ``rope``.
        """
        ...


class MixerConfig(Protocol):
    """Shape of a mixer over the whole model."""

    def build(self, hidden_size: int, ctx: StageContext) -> nn.Module:
        """This rank's ``Mixer``."""
        ...

    def with_window(self, window: int) -> MixerConfig:
        """The same, where it has one, with a sliding window of so many tokens."""
        ...

    def check(self, tp_size: int) -> None:
        """Raises:
        UserError: it cannot be cut over so many ranks.
        """
        ...


class MLPConfig(Protocol):
    """Shape of an MLP over the whole model. A module that counts the tokens of each expert keeps the counts in ``num_tokens_E``."""

    has_experts: ClassVar[bool]
    """Whether some of its weights are experts'."""
    reads_hidden: ClassVar[bool]
    """Whether ``forward`` is also given the hidden states, (T, D), of which its input is a norm."""
    num_sums: ClassVar[int]
    """Sums over the ranks in ``forward``."""

    def build(self, hidden_size: int, ctx: StageContext) -> nn.Module:
        """This rank's part: (T, D) → (T, D), the sum over the ranks."""
        ...
