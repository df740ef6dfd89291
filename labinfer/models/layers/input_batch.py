"""ModelInputBatch: the input of a model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from labinfer.functions.attention_batch import AttentionBatch


@dataclass(frozen=True)
class PromptRow:
    """A row whose next token is the prompt's own."""

    row: int
    entry: int
    """Index of its sequence in the plan."""
    next_token: int
    top: int
    """Number of likeliest tokens to return beside it."""


@dataclass(frozen=True)
class PooledRows:
    """Rows whose final hidden states go into the vector of their sequence."""

    begin: int
    end: int
    entry: int
    """Index of its sequence in the plan."""


@dataclass(frozen=True)
class LongPrompts:
    """Tokens whose rows of the rotary tables ``Decoder.place_prompts`` fills, in the order of these rows."""

    positions: list[int]
    lengths: list[int]
    """Tokens of the prompt that each belongs to."""


@dataclass(frozen=True)
class OutputRows:
    """Rows that somebody asks for at the end of the model, and their attention: its last layer computes no others."""

    rows_R: torch.Tensor
    """In order, those of a sequence the last of its rows; int64."""
    attention: AttentionBatch
    """Attention batch of the sequences that have such rows."""
    windowed: AttentionBatch | None = None
    """The same in layers that ``WindowedPlaces`` are for."""


@dataclass(frozen=True)
class WindowedPlaces:
    """Places of tokens in layers with a window, where these have KV blocks of their own."""

    slots_T: torch.Tensor
    """As ``ModelInputBatch.slots_T``."""
    attention: AttentionBatch
    """Blocks that no query of a sequence sees a token of may be any in its tables."""


@dataclass(frozen=True, kw_only=True)
class ModelInputBatch:
    """A flat batch of new tokens of several sequences."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    """Rows of the rotary tables: positions, but for tokens of ``long_prompts``."""
    attention: AttentionBatch
    slots_T: torch.Tensor
    """Slot in the cache for each token's keys and values: block × block size + offset."""
    sample_rows_B: torch.Tensor
    """The rows whose next token is sampled."""
    prompt_rows: list[PromptRow]
    """The prompt tokens whose log-probabilities the request asks for."""
    pooled: list[PooledRows]
    long_prompts: LongPrompts | None = None
    """Tokens of prompts that ``dynamic`` rope rotates by their prompt's length; None where there are none."""
    output_rows: OutputRows | None = None
    """The rows that ``Decoder.forward`` gives on the last stage; None for all."""
    windowed: WindowedPlaces | None = None
    """For layers with a window; None where they hold their tokens as all others."""

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Addresses of its tensors, after the numbers of sequences, of rows and of rows to sample."""
        attention = self.attention
        tensors = (
            *(self.token_ids_T, self.positions_T, self.slots_T, self.sample_rows_B, attention.state_slots_B),
            *(attention.tables_N, attention.row_ptr_B, attention.context_lens_B, attention.table_ptr_B),
            *((self.windowed.slots_T, self.windowed.attention.tables_N) if self.windowed is not None else ()),
        )
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        return len(attention.context_lens), len(self.token_ids_T), len(self.sample_rows_B), *addresses
