"""The plain data in which engine and worker meet. No torch here: the engine imports this file.

A plan is a *delta*: a sequence is sent once (``SequenceStart``), later plans only name it. Every rank
keeps the same picture of the running sequences, because every rank sees the same plans in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from labinfer.base.draw_params import DrawParams

TOKEN_BYTES, FLOAT_BYTES, STEP_ID_BYTES = 5, 9, 9
"""Bytes in msgpack at most; token ids have 32 bits."""
POOLINGS = ("last", "mean", "cls")
"""Vectors of a prompt's final hidden states: the last token's, the mean over all tokens, or the first token's."""
WHOLE_PROMPT_POOLINGS = ("mean", "cls")
"""Poolings of hidden states before the last token's: no part of the prompt may come from the prefix cache."""
NO_SLOT = -1
NO_TOKEN = -1
"""Sampled in place of a token id where a request's constraints together forbid every token."""
MoveKind = Literal[
    "copy",
    "swap_out",
    "swap_in",
    "copy_window",
    "swap_out_window",
    "swap_in_window",
    "copy_state",
    "swap_out_state",
    "swap_in_state",
]
"""Moves of blocks, of blocks of windowed layers where these have their own, and of states."""


class TokenSampling(DrawParams, frozen=True, array_like=True, kw_only=True):
    """The part of ``SamplingParams`` that the last stage needs, in token ids."""

    num_prompt_tokens: int
    logprobs: int | None = None
    after_processors: bool = False
    """Whether ``logprobs`` are measured after the processors (beam search) instead of before them."""
    prompt_logprobs: int | None = None
    processors: list[tuple[str, Any]] = []
    """Name and argument of each logits processor, in order."""
    pooling: str = ""
    """Pooling, of ``POOLINGS``: nothing is sampled, and the prompt comes to a vector instead. Empty where tokens are sampled."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural) of a token, and of the likeliest ones in its place."""

    token_id: int
    logprob: float
    top: dict[int, float]
    """The likeliest tokens, in falling order."""
    rank: int = 0
    """Place of the token among all by log-probability, from 1 on; 0 where it was not counted, as for sampled tokens."""

    @staticmethod
    def max_bytes(top: int | None) -> int:
        """Bytes of one on the wire at most, with so many of the likeliest tokens; 0 where none is measured."""
        pair = TOKEN_BYTES + FLOAT_BYTES
        return 0 if top is None else 1 + pair + length_bytes(top) + top * pair + TOKEN_BYTES


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence the workers have not seen yet (or have forgotten, when it was preempted)."""

    seq_id: int
    token_ids: list[int]
    sampling: TokenSampling
    state_slot: int = NO_SLOT
    """Slot of its state in layers that keep one for each sequence."""


class CacheMove(msgspec.Struct, frozen=True, array_like=True):
    """Move of whole KV blocks, or of states, before a step runs; a list of moves is carried out in order."""

    kind: MoveKind
    source: list[int]
    dest: list[int]
    """Blocks or slots that are written, as many as ``source``; those of the host pool on the far side of a swap."""
    shift: int = 0
    """Positions that copied keys move by: they are rotated by so much."""


class BatchEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Part of one sequence in a step: run its next ``num_tokens`` tokens through the model."""

    seq_id: int
    num_tokens: int
    begin: int
    """Index of the first of them in the sequence; those before it are in the KV cache, or have left the context."""
    position: int
    """Position of the first of them: its index less the tokens that have left the context."""
    first_block: int
    """The sequence's block table is cut to this many blocks …"""
    new_blocks: list[int]
    """… and goes on with these."""
    new_tokens: tuple[int, ...] = ()
    """The last of the tokens to run, as far as the workers do not know them. They take the place of tokens that were
    drafted before and proved wrong."""
    num_samples: int = 0
    """A next token is sampled for each of the sequence's last so many prefixes: 0 before the prompt's end, then 1, and one
    more for each drafted token; one for each token of a chunk of drafted ones behind another chunk."""
    masks: tuple[bytes, ...] = ()
    """For each sample the only tokens that may come, see ``engine/guide.py``; none for any."""
    first_window_block: int = 0
    """The same two of the table of windowed layers, where these have blocks of their own. A table's first entries may be stale: no
    token sees what was there."""
    new_window_blocks: list[int] = []
    is_decode: bool = False
    """Whether each token leads to the next; otherwise these are of a prompt, or several that are computed again."""
    num_drafts: int = 0
    """Tokens that the last stage's MTP layer is to guess behind those that are sampled. There are blocks for what they leave in its
    cache."""


class BatchPlan(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="plan"):
    """Micro-batch for all ranks. Entries are in the order of the rows of ``ModelInputBatch``."""

    step_id: int
    starts: list[SequenceStart]
    finished: list[int]
    """Sequences to forget; applied before ``starts``."""
    moves: list[CacheMove]
    """Done before anything is run."""
    entries: list[BatchEntry]
    result_bytes: int = 0
    """The result's encoding has so many bytes at most: its sender and its receiver both make room for them."""
    model: int = 0
    """Which of the group's models it is for."""

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def num_decodes(self) -> int:
        return sum(entry.is_decode for entry in self.entries)

    @property
    def num_samples(self) -> int:
        return sum(entry.num_samples for entry in self.entries)


def count_accepted(drafted: Sequence[int], sampled: Sequence[int]) -> int:
    """Number of drafted tokens before the first one that differs from the sampled token.

    A draw depends on the tokens before it, its position and the seed alone, so tokens sampled behind accepted ones are valid.
    """
    num_accepted = 0
    for draft, token in zip(drafted, sampled, strict=False):
        if draft != token:
            break
        num_accepted += 1
    return num_accepted


class EntryResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Result of one entry of a plan."""

    token_ids: tuple[int, ...] = ()
    """Sampled: one for each of the entry's ``num_samples``."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For these tokens, where the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For the prompt's tokens that follow those that were run, where the request asks for them."""
    vector: tuple[float, ...] = ()
    """With the end of a prompt that is pooled."""
    draft: tuple[int, ...] = ()
    """Guessed tokens behind the last one that counts: the entry's ``num_drafts``."""

    @staticmethod
    def max_bytes(
        *,
        num_samples: int = 0,
        top: int | None = None,
        num_prompt: int = 0,
        prompt_top: int | None = None,
        num_numbers: int = 0,
        num_drafts: int = 0,
    ) -> int:
        """Bytes of one on the wire at most.

        Args:
            top: see ``TokenSampling.logprobs``.
            num_prompt: log-probabilities of prompt tokens.
            prompt_top: see ``TokenSampling.prompt_logprobs``.
            num_numbers: numbers of the vector.
            num_drafts: see ``BatchEntry.num_drafts``.
        """
        return (
            1
            + length_bytes(num_samples)
            + num_samples * TOKEN_BYTES
            + length_bytes(num_samples)
            + num_samples * TokenLogprobs.max_bytes(top)
            + length_bytes(num_prompt)
            + num_prompt * TokenLogprobs.max_bytes(prompt_top)
            + length_bytes(num_numbers)
            + num_numbers * FLOAT_BYTES
            + length_bytes(num_drafts)
            + num_drafts * TOKEN_BYTES
        )


class BatchResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Results of a step, in the order of the plan's entries."""

    step_id: int
    entries: list[EntryResult]

    @staticmethod
    def max_bytes(num_entries: int) -> int:
        """Bytes on the wire at most, beside those of the entries."""
        return 1 + STEP_ID_BYTES + length_bytes(num_entries)

    def encode(self) -> bytes:
        return _encode(self)

    @staticmethod
    def decode(data: bytes | memoryview) -> BatchResult:
        """Raises:
        msgspec.DecodeError: it is no result.
        """
        return _decode_result(data)


def length_bytes(length: int) -> int:
    """Bytes that msgpack takes for the length of a list or mapping."""
    return 1 if length < 16 else 3 if length < 1 << 16 else 5


_encode = msgspec.msgpack.Encoder().encode
_decode_result = msgspec.msgpack.Decoder(BatchResult).decode


class EndRun(msgspec.Struct, frozen=True, array_like=True, tag="end_run"):
    """The end of a model's run: followers forget ``finished`` and report their ``WorkerStats``."""

    finished: list[int]
    model: int = 0


Command = BatchPlan | EndRun
"""Messages that rank 0 sends down the control channel."""


class DraftStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that the rank with the draft model has not seen yet."""

    seq_id: int
    sampling: TokenSampling
    ends: list[int]
    """Tokens that end it."""
    salt: str
    """Only sequences with the same one find each other's tokens in the cache."""


class DraftEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence that tokens are to be drafted for."""

    seq_id: int
    begin: int
    """Index of the first token in ``token_ids``."""
    token_ids: list[int]
    """The sequence's tokens from ``begin`` on. They replace those of the last request."""
    num_unverified: int
    """Drafted tokens at the end of ``token_ids``, which may be rejected."""
    limit: int
    """Tokens to draft at most."""


class DraftRequest(msgspec.Struct, frozen=True, array_like=True, tag="draft_request"):
    """Rank 0 asks for drafts."""

    starts: list[DraftStart]
    finished: list[int]
    """Sequences to forget."""
    entries: list[DraftEntry]


class DraftAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Drafted tokens for each entry of a request."""

    drafts: list[list[int]]
    error: str = ""
    """The reason why there are none, and will be none."""


DraftCommand = DraftRequest | EndRun
"""Messages that rank 0 sends to the rank with the draft model."""
