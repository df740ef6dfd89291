"""The data types by which engine and worker communicate. No torch here: the engine imports this file.

A plan is a *delta*: a sequence is sent once (``SequenceStart``), and later plans refer to it by its id. Every rank
keeps identical copies of the running sequences, because all ranks receive all plans in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from labinfer.base.draw_params import DrawParams

TOKEN_BYTES, FLOAT_BYTES, STEP_ID_BYTES = 5, 9, 9
"""Maximum size in bytes of a token id (32 bits), a float and a step id in msgpack."""
POOLINGS = ("last", "mean", "cls")
"""Ways to pool a prompt's final hidden states: the last token's, the mean over all tokens, or the first token's."""
WHOLE_PROMPT_POOLINGS = ("mean", "cls")
"""Poolings that need hidden states of tokens before the last one: no part of the prompt may come from the prefix cache."""
NO_SLOT = -1
NO_TOKEN = -1
"""Result of sampling in place of a token id, if a request's constraints together forbid every token."""
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
"""Kinds of moves: copies and swaps of KV blocks, of window blocks (separate KV blocks of sliding-window layers), and of
recurrent states."""


class TokenSampling(DrawParams, frozen=True, array_like=True, kw_only=True):
    """The parameters of ``SamplingParams`` that the last stage needs, with strings converted to token ids."""

    num_prompt_tokens: int
    logprobs: int | None = None
    after_processors: bool = False
    """Whether ``logprobs`` are computed after the logits processors (for beam search) rather than before."""
    prompt_logprobs: int | None = None
    processors: list[tuple[str, Any]] = []
    """Name and argument of each logits processor, in the order in which they run."""
    pooling: str = ""
    """Pooling of an embedding request, one of ``POOLINGS``: the result is a vector, and nothing is sampled. Empty for
    generation."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probability of a token, and of the likeliest tokens at its position."""

    token_id: int
    logprob: float
    top: dict[int, float]
    """Log-probabilities of the likeliest tokens by token id, in descending order."""
    rank: int = 0
    """Rank of the token by log-probability, 1 for the likeliest; 0 if it is not computed, as for sampled tokens."""

    @staticmethod
    def max_bytes(top: int | None) -> int:
        """Maximum encoded size in bytes with ``top`` likeliest tokens; 0 if ``top`` is None."""
        pair = TOKEN_BYTES + FLOAT_BYTES
        return 0 if top is None else 1 + pair + length_bytes(top) + top * pair + TOKEN_BYTES


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that the workers do not have: it is new, or they dropped it when it was preempted."""

    seq_id: int
    token_ids: list[int]
    sampling: TokenSampling
    state_slot: int = NO_SLOT
    """Slot of the sequence's recurrent state; ``NO_SLOT`` if no layer has such a state."""


class CacheMove(msgspec.Struct, frozen=True, array_like=True):
    """Copy or swap of whole KV blocks or recurrent states before a step runs. The moves of a plan are carried out in
    order."""

    kind: MoveKind
    source: list[int]
    dest: list[int]
    """Blocks or slots to write, one for each of ``source``. For a swap, one of the two lists refers to the host pool."""
    shift: int = 0
    """Number of positions by which copied keys are shifted (by re-rotation); 0 for none."""


class BatchEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The tokens of one sequence in a step: its next ``num_tokens`` tokens run through the model."""

    seq_id: int
    num_tokens: int
    begin: int
    """Index in the sequence of the first token to run. Tokens before it are in the KV cache, or context shifts removed them."""
    position: int
    """Position of the first token to run: ``begin`` minus the number of tokens that context shifts removed."""
    first_block: int
    """Length, in blocks, to which the sequence's block table is truncated before ``new_blocks`` are appended."""
    new_blocks: list[int]
    """Blocks to append to the truncated block table."""
    new_tokens: tuple[int, ...] = ()
    """The last tokens to run, those that the workers do not have yet. They replace rejected drafted tokens, if the workers
    have any."""
    num_samples: int = 0
    """Number of tokens to sample, one after each of the last ``num_samples`` tokens to run: 0 before the prompt's end, then one
    after the last verified token (unless all tokens to run are drafted), and one after each drafted token."""
    masks: tuple[bytes, ...] = ()
    """Bit mask of the allowed tokens for each token to sample, see ``engine/guide.py``; empty for no constraint."""
    first_window_block: int = 0
    """``first_block`` for the block table of window blocks, if sliding-window layers have blocks of their own (see also
    ``new_window_blocks``). Leading entries of that table may be stale, as no token attends to them."""
    new_window_blocks: list[int] = []
    is_decode: bool = False
    """Whether the entry is a decode: no token to run is a prompt token, and a token is sampled after each of them."""
    num_drafts: int = 0
    """Number of tokens that the MTP layer on the last stage drafts after the sampled ones. Blocks for their keys and
    values are allocated."""


class BatchPlan(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="plan"):
    """A micro-batch, sent to all ranks. Entries are in the order of the rows of ``ModelInputBatch``."""

    step_id: int
    starts: list[SequenceStart]
    finished: list[int]
    """Ids of sequences that the workers drop before they add ``starts``."""
    moves: list[CacheMove]
    """Moves to carry out before the step runs."""
    entries: list[BatchEntry]
    result_bytes: int = 0
    """Maximum encoded size of the result, for which sender and receiver allocate buffers."""
    model: int = 0
    """Index of the model that runs the plan, among all models that the ranks have loaded."""

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
    """Number of accepted drafted tokens: those before the first one that differs from the sampled token.

    A draw depends on the tokens before it, its position and the seed alone, so tokens sampled after accepted ones are valid.
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
    """Sampled tokens, as many as the entry's ``num_samples``."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the sampled tokens, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of prompt tokens, if requested: for each token of the chunk, the log-probability of the prompt token
    that follows it."""
    vector: tuple[float, ...] = ()
    """Pooled vector of an embedding request, in the result of the prompt's last token."""
    draft: tuple[int, ...] = ()
    """Tokens drafted by the MTP layer after the last valid token, as many as the entry's ``num_drafts``."""

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
        """Maximum encoded size of a result in bytes.

        Args:
            top: see ``TokenSampling.logprobs``.
            num_prompt: number of prompt log-probabilities.
            prompt_top: see ``TokenSampling.prompt_logprobs``.
            num_numbers: length of the vector.
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
    """Results of a step, one per entry of the plan, in the order of the entries."""

    step_id: int
    entries: list[EntryResult]

    @staticmethod
    def max_bytes(num_entries: int) -> int:
        """Maximum encoded size in bytes of a result with ``num_entries`` entries, not counting the entries themselves."""
        return 1 + STEP_ID_BYTES + length_bytes(num_entries)

    def encode(self) -> bytes:
        return _encode(self)

    @staticmethod
    def decode(data: bytes | memoryview) -> BatchResult:
        """Decode a result.

        Raises:
            msgspec.DecodeError: ``data`` is not an encoded ``BatchResult``.
        """
        return _decode_result(data)


def length_bytes(length: int) -> int:
    """Bytes that msgpack takes to encode the length of a list or a mapping."""
    return 1 if length < 16 else 3 if length < 1 << 16 else 5


_encode = msgspec.msgpack.Encoder().encode
_decode_result = msgspec.msgpack.Decoder(BatchResult).decode


class EndRun(msgspec.Struct, frozen=True, array_like=True, tag="end_run"):
    """End of a model's run: the other ranks drop the sequences ``finished``, and report their ``WorkerStats``."""

    finished: list[int]
    model: int = 0


Command = BatchPlan | EndRun
"""Commands of rank 0 to all other ranks, sent over the control channel."""


class DraftStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that the rank with the draft model does not have yet."""

    seq_id: int
    sampling: TokenSampling
    ends: list[int]
    """Stop token ids."""
    salt: str
    """Prefix-cache salt: only sequences with equal salts share cached blocks."""


class DraftEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence for which to draft tokens."""

    seq_id: int
    begin: int
    """Index in the sequence of the first of ``token_ids``."""
    token_ids: list[int]
    """The sequence's tokens from ``begin`` on. They replace all tokens from there on that earlier requests have sent."""
    num_unverified: int
    """Number of drafted tokens at the end of ``token_ids`` that are not verified yet, and may be rejected."""
    limit: int
    """Maximum draft length."""


class DraftRequest(msgspec.Struct, frozen=True, array_like=True, tag="draft_request"):
    """Request of rank 0 to the rank with the draft model: sequences for which to draft."""

    starts: list[DraftStart]
    finished: list[int]
    """Ids of sequences that the rank with the draft model drops."""
    entries: list[DraftEntry]


class DraftAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Drafted tokens for each entry of a ``DraftRequest``."""

    drafts: list[list[int]]
    error: str = ""
    """Reason why drafting has failed; no more drafts will come. Empty for success."""


DraftCommand = DraftRequest | EndRun
"""Commands of rank 0 to the spare rank with the draft model."""
