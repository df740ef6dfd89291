"""Drafts of a model on a rank of its own: ``RemoteProposer`` asks for them on rank 0, ``Drafter`` answers there."""

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
    """Requests to the rank that drafts and its answers. At most one request is in flight."""

    def ask(self, request: DraftRequest) -> None:
        """Send a request; does not wait."""
        ...

    def take(self) -> DraftAnswer | None:
        """Wait for the answer to the last request; None where it was taken before, or nothing was asked."""
        ...


@dataclass(eq=False, kw_only=True)
class AskedSequence:
    """A sequence that the drafter knows."""

    sequence: Sequence
    num_certain: int = 0
    """Tokens of it that could not prove wrong any more when drafts were last asked for."""
    ahead: list[int] = field(default_factory=list)
    """Tokens that were taken to follow these, and those that were drafted behind them."""

    def draft(self) -> list[int]:
        """The drafted tokens behind the present ones, if all that were taken to come have come."""
        since = self.sequence.token_ids[self.num_certain :]
        return self.ahead[len(since) :] if self.ahead[: len(since)] == since else []


class RemoteProposer:
    """Gives what another rank has drafted while the stages ran the step before, and asks it to go on.

    With every draft that it gives, it asks for the tokens behind it, the one that the model will sample last among them: if
    that draft proves right, the next one is there. If not, new tokens are asked for and used a step later; where
    no sequence that it has asked for is on its way, they are waited for at once, although a step of others may be: a prefill, or
    sequences without speculation.

    The mask of a form is not known there. What the form forbids is cut off here, as with MTP layers.

    Args:
        eos_token_ids: tokens that end an answer unless its request ignores them.
    """

    def __init__(self, channel: DraftChannel, eos_token_ids: Iterable[int]):
        self._channel, self._eos_token_ids = channel, frozenset(eos_token_ids)
        self._known: dict[int, AskedSequence] = {}
        self._asked: list[AskedSequence] = []  # by the entries of the last request
        self._finished: list[int] = []

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Tokens that may follow each sequence's, at most so many."""
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
        """Have the drafter forget sequences that have ended, with the next request."""
        for sequence in sequences:
            if self._known.pop(sequence.seq_id, None) is not None:
                self._finished.append(sequence.seq_id)

    def _drafts(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        asked = [self._known.get(sequence.seq_id) for sequence in sequences]
        return [known.draft()[:limit] if known else [] for known, limit in zip(asked, limits, strict=True)]

    def _ask(self, asking: list[tuple[Sequence, int, list[int]]]) -> None:
        """Request drafted tokens: at most ``limit`` for each sequence, behind its draft."""
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
        """Take in the answer to the last request, if it was not yet.

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
        """Draft what is asked for; never raises, as no answer of the model needs a draft."""
        try:
            return DraftAnswer(self._draft(request))
        except Exception as error:  # noqa: BLE001 - rank 0 tells of it, and asks no more
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
