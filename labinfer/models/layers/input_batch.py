"""ModelInputBatch: the input of a model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from labinfer.functions.attention_batch import AttentionBatch


@dataclass(frozen=True)
class PromptRow:
    """A prompt row for which the log-probability of the prompt's next token is requested."""

    row: int
    entry: int
    """Index of the row's sequence in the plan."""
    next_token: int
    top: int
    """Number of most likely tokens to return besides ``next_token``."""


@dataclass(frozen=True)
class PooledRows:
    """Rows whose final hidden states are pooled into their sequence's embedding."""

    begin: int
    end: int
    entry: int
    """Index of the rows' sequence in the plan."""


@dataclass(frozen=True)
class LongPrompts:
    """Tokens of long prompts with ``dynamic`` rope, in the order of the rows that ``Decoder.place_prompts`` fills."""

    positions: list[int]
    lengths: list[int]
    """Length of each token's prompt."""


@dataclass(frozen=True)
class OutputRows:
    """Rows (tokens of the batch) whose final hidden states are needed; the model's last layer computes only these."""

    rows_R: torch.Tensor
    """Row indices in ascending order, int64; a sequence's output rows are the last of its rows."""
    attention: AttentionBatch
    """Attention batch of the sequences that have output rows."""
    windowed: AttentionBatch | None = None
    """Attention batch of the output rows in sliding-window layers that have KV blocks of their own."""


@dataclass(frozen=True)
class WindowedSlots:
    """Cache slots and block tables of sliding-window layers, if these have KV blocks of their own."""

    slots_T: torch.Tensor
    """Cache slot of each token in sliding-window layers; see ``ModelInputBatch.slots_T``."""
    attention: AttentionBatch
    """Attention batch with block tables of sliding-window layers; entries before the window of all queries may name any block."""


@dataclass(frozen=True, kw_only=True)
class ModelInputBatch:
    """A flat batch of new tokens of several sequences."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    """Rows of the rotary tables: positions, except for tokens of ``long_prompts``."""
    attention: AttentionBatch
    slots_T: torch.Tensor
    """Cache slot of each token's keys and values: block × block size + offset."""
    sample_rows_B: torch.Tensor
    """Rows whose next token is sampled."""
    prompt_rows: list[PromptRow]
    """Prompt rows whose log-probabilities are requested."""
    pooled: list[PooledRows]
    long_prompts: LongPrompts | None = None
    """Tokens whose ``dynamic`` rope depends on the length of their prompt; None if there are none."""
    output_rows: OutputRows | None = None
    """Rows that ``Decoder.forward`` returns on the last stage; None for all."""
    windowed: WindowedSlots | None = None
    """Slots and block tables of sliding-window layers; None if these share the other layers' KV blocks."""

    @cached_property
    def graph_key(self) -> tuple[int, ...]:
        """Key for captured steps: numbers of sequences, rows and sampled rows, and the addresses of all tensors."""
        attention = self.attention
        tensors = (
            *(self.token_ids_T, self.positions_T, self.slots_T, self.sample_rows_B, attention.state_slots_B),
            *(attention.tables_N, attention.row_ptr_B, attention.context_lens_B, attention.table_ptr_B),
            *((self.windowed.slots_T, self.windowed.attention.tables_N) if self.windowed is not None else ()),
        )
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        return len(attention.context_lens), len(self.token_ids_T), len(self.sample_rows_B), *addresses
