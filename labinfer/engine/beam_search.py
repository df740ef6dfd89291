"""Beam search: the few continuations with the most probability, by the rules of Transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import FinishedBeam, FinishReason


class Beam(Protocol):
    """Continuation of a prompt, as the search sees it."""

    @property
    def output_ids(self) -> list[int]: ...

    @property
    def num_output_tokens(self) -> int: ...


Member = TypeVar("Member", bound=Beam)


class Child(NamedTuple):
    """A beam one token longer."""

    score: float
    """Sum of its tokens' log-probabilities."""
    parent: int
    token: int


@dataclass(eq=False, kw_only=True)
class BeamGroup(Generic[Member]):
    """The beams of one request, and the answers they have come to. It is advanced when every beam has its next token.

    Args:
        members: as many as beams; the first one runs the prompt.
        ends: tokens that end an answer.
        max_tokens: after so many tokens every answer ends.
    """

    members: list[Member]
    sampling: SamplingParams
    ends: Collection[int]
    max_tokens: int
    scores: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    """Sums of log-probabilities, by the index of each member that is a beam now."""
    finished: list[FinishedBeam] = field(default_factory=list)
    """Answers so far, the best first."""
    _tops: dict[int, dict[int, float]] = field(default_factory=dict)

    @staticmethod
    def num_candidates(sampling: SamplingParams, ends: Collection[int]) -> int:
        """Tokens that are looked at, over all beams: enough to go on with where each one's likeliest ones end it."""
        return max(2, 1 + len(ends)) * sampling.num_beams

    def take(self, member: Member, top: dict[int, float]) -> bool:
        """A beam's likeliest next tokens with their log-probabilities. Returns whether all beams have theirs."""
        self._tops[self.members.index(member)] = top
        return len(self._tops) == len(self.scores)

    def has_token(self, member: Member) -> bool:
        """Whether this beam waits for the others."""
        return self.members.index(member) in self._tops

    def advance(self) -> list[Child]:
        """The next beams, the best first; none when the search is over. Their scores are set by the caller."""
        sampling, num_beams = self.sampling, self.sampling.num_beams
        every = (
            (self.scores[index] + logprob, index, token)
            for index, top in sorted(self._tops.items())
            for token, logprob in top.items()
            if logprob > float("-inf")
        )
        best = nlargest(self.num_candidates(sampling, self.ends), every, key=itemgetter(0))
        candidates, self._tops = [Child(*values) for values in best], {}
        if not candidates:  # the request's constraints allow no beam another token
            return []
        length = self.members[candidates[0].parent].num_output_tokens + 1
        running: list[Child] = []
        for place, child in enumerate(candidates):
            if child.token in self.ends or length == self.max_tokens:
                if place < num_beams:  # those behind are there to go on with
                    self._finish(child, length)
            elif len(running) < num_beams:
                running.append(child)
        return running if running and self._may_improve(running[0].score, length) else []

    def _finish(self, child: Child, length: int) -> None:
        answer = [*self.members[child.parent].output_ids, child.token]
        reason = FinishReason.STOP if child.token in self.ends else FinishReason.LENGTH
        self.finished.append(FinishedBeam(child.score / length**self.sampling.length_penalty, answer, reason))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.sampling.num_beams :]

    def _may_improve(self, best_score: float, length: int) -> bool:
        """Whether the best running beam could still come to a better answer than the worst there is."""
        if len(self.finished) < self.sampling.num_beams:
            return True
        if self.sampling.early_stopping is True:
            return False
        if self.sampling.early_stopping == "never" and self.sampling.length_penalty > 0:
            length = self.max_tokens
        return best_score / length**self.sampling.length_penalty > self.finished[-1].score
