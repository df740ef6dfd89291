"""Drafting on another rank: ``RemoteProposer`` on rank 0 requests drafts, ``Drafter`` on the other rank answers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from labinfer.base.errors import first_line
from labinfer.base.plan import DraftAnswer, DraftEntry, DraftRequest, DraftStart
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.block_table import SequenceCache
from labinfer.engine.proposer import Proposer
from labinfer.engine.request import Request
from labinfer.engine.sequence import Sequence

logger = logging.getLogger(__name__)


class DraftChannel(Protocol):
    """Channel to the rank that drafts, with at most one request in flight."""

    def ask(self, request: DraftRequest) -> None:
        """Send a request; does not wait."""
        ...

    def take(self) -> DraftAnswer | None:
        """Wait for the answer to the last request; None if no request is in flight."""
        ...


@dataclass(eq=False, kw_only=True)
class AskedSequence:
    """A sequence for which drafts were requested, and whose tokens the drafting rank therefore keeps."""

    sequence: Sequence
    num_certain: int = 0
    """Number of verified tokens of the sequence at the last request."""
    ahead: list[int] = field(default_factory=list)
    """Assumed continuation of the verified tokens: unverified tokens, the draft in use, and newly drafted tokens."""

    def draft(self) -> list[int]:
        """Drafted tokens after the sequence's present tokens; empty if the present tokens differ from the assumed continuation."""
        since = self.sequence.token_ids[self.num_certain :]
        return self.ahead[len(since) :] if self.ahead[: len(since)] == since else []


class RemoteProposer:
    """Proposer on rank 0 that returns drafts made by another rank during the last step, and requests the next drafts.

    Each request asks for the tokens after the draft just returned, beginning with the one that the model samples after
    it. If the whole draft is accepted, the next draft is ready. If part of it is rejected, new tokens are requested,
    and used one step later. The engine waits for them immediately only if no drafted sequence has a step in flight;
    steps of other sequences (prefills, or sequences without speculation) do not count.

    The drafting rank does not apply the grammar masks of structured outputs. Tokens that a mask forbids are cut off
    here, as with MTP layers.

    Args:
        eos_token_ids: ids that end an answer unless its request ignores them.
    """

    def __init__(self, channel: DraftChannel, eos_token_ids: Iterable[int]):
        self._channel, self._eos_token_ids = channel, frozenset(eos_token_ids)
        self._known: dict[int, AskedSequence] = {}
        self._asked: list[AskedSequence] = []  # in the order of the last request's entries
        self._finished: list[int] = []

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return drafts of at most ``limits[i]`` tokens for ``sequences[i]``, and request the next ones."""
        self._take()
        drafts = self._drafts(sequences, limits)
        if not all(drafts) and not any(known.sequence.num_in_flight for known in self._known.values()):
            asking = zip(sequences, limits, drafts, strict=True)
            self._ask([(sequence, limit, draft) for sequence, limit, draft in asking if not draft])
            self._take()
            drafts = self._drafts(sequences, limits)
        self._ask([(seq, limit + 1, draft) for seq, limit, draft in zip(sequences, limits, drafts, strict=True)])
        return drafts

    def forget(self, sequences: list[Sequence]) -> None:
        """Tell the drafter with the next request to forget ended sequences."""
        for sequence in sequences:
            if self._known.pop(sequence.seq_id, None) is not None:
                self._finished.append(sequence.seq_id)

    def _drafts(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        asked = [self._known.get(sequence.seq_id) for sequence in sequences]
        return [known.draft()[:limit] if known else [] for known, limit in zip(asked, limits, strict=True)]

    def _ask(self, asking: list[tuple[Sequence, int, list[int]]]) -> None:
        """Request up to ``limit`` more drafted tokens per sequence, continuing after its tokens and its current draft.

        Args:
            asking: (sequence, limit, current draft) of each sequence.
        """
        starts, entries, self._asked = [], [], []
        for sequence, limit, draft in asking:
            seq_id, token_ids = sequence.seq_id, sequence.token_ids + draft
            known = self._known.get(seq_id)
            if known is None:
                known = self._known[seq_id] = AskedSequence(sequence=sequence)
                ends = sorted(sequence.request.ends(self._eos_token_ids))
                starts.append(DraftStart(seq_id, sequence.token_sampling, ends, sequence.cache.salt))
            begin, known.num_certain = known.num_certain, len(sequence.token_ids) - sequence.num_unverified
            known.ahead = token_ids[known.num_certain :]
            entries.append(
                DraftEntry(
                    seq_id=seq_id,
                    begin=begin,
                    token_ids=token_ids[begin:],
                    num_unverified=len(known.ahead),
                    limit=limit,
                )
            )
            self._asked.append(known)
        self._channel.ask(DraftRequest(starts, self._finished, entries))
        self._finished = []

    def _take(self) -> None:
        """Receive the answer to the request in flight, if there is one.

        Raises:
            RuntimeError: the drafter has failed.
        """
        answer = self._channel.take()
        if answer is None:
            return
        if answer.error:
            raise RuntimeError(answer.error)
        for known, tokens in zip(self._asked, answer.drafts, strict=True):
            known.ahead += tokens


class Drafter:
    """Answers requests of a ``RemoteProposer`` with the drafts of another proposer."""

    def __init__(self, proposer: Proposer):
        self._proposer = proposer
        self._sequences: dict[int, Sequence] = {}

    def answer(self, request: DraftRequest) -> DraftAnswer:
        """Draft for the entries of a request. Never raises: an error is returned in the answer, as the model's output
        does not depend on drafts."""
        try:
            return DraftAnswer(self._draft(request))
        except Exception as error:  # noqa: BLE001 - rank 0 logs the error and requests no more drafts
            logger.debug("drafting failed", exc_info=error)
            return DraftAnswer([], f"{type(error).__name__}: {first_line(error)}")

    def _draft(self, request: DraftRequest) -> list[list[int]]:
        self._proposer.forget([self._sequences.pop(seq_id) for seq_id in request.finished])
        for start in request.starts:
            own = Request(
                key=start.seq_id, prompt_token_ids=[], sampling=SamplingParams(stop_token_ids=tuple(start.ends))
            )
            self._sequences[start.seq_id] = Sequence(
                seq_id=start.seq_id,
                request=own,
                token_ids=[],
                token_sampling=start.sampling,
                max_tokens=0,
                max_context=0,
                cache=SequenceCache(salt=start.salt),
            )
        for entry in request.entries:
            sequence = self._sequences[entry.seq_id]
            sequence.token_ids[entry.begin :] = entry.token_ids
            sequence.num_unverified = entry.num_unverified
        asked = [self._sequences[entry.seq_id] for entry in request.entries]
        return self._proposer.propose(asked, [entry.limit for entry in request.entries])
