"""Beam search: keeps the ``num_beams`` most probable continuations, by the rules of Transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter
from typing import NamedTuple

import msgspec

from labinfer.base.config import SchedulerOptions
from labinfer.base.errors import UserError
from labinfer.base.plan import EntryResult, TokenSampling
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.constraints import no_token_left
from labinfer.engine.request import FinishedBeam, FinishReason, Request
from labinfer.engine.scheduler import Scheduler
from labinfer.engine.sequence import Sequence, token_sampling


class Child(NamedTuple):
    """Candidate beam: a parent beam with one more token."""

    score: float
    """Sum of the log-probabilities of the beam's tokens."""
    parent: int
    token: int


@dataclass(eq=False, kw_only=True)
class BeamGroup:
    """Beams of one request, and its finished answers. The scheduler calls ``advance`` as soon as every active beam has
    its next tokens.

    Args:
        members: one sequence per beam; the first one runs the prompt.
        ends: stop token ids.
        max_tokens: maximum number of output tokens.
        forks: forks and releases the members' blocks and queue slots.
    """

    members: list[Sequence]
    sampling: SamplingParams
    ends: Collection[int]
    max_tokens: int
    forks: BeamForks | None = None
    scores: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    """Sum of log-probabilities of each active beam, by its index in ``members``."""
    finished: list[FinishedBeam] = field(default_factory=list)
    """Finished answers, best first."""
    _tops: dict[int, dict[int, float]] = field(default_factory=dict)

    @staticmethod
    def num_candidates(sampling: SamplingParams, ends: Collection[int]) -> int:
        """Number of likeliest next tokens to fetch for each beam, and of candidates to keep over all beams. It is large enough that
        the search can continue even if each beam's likeliest tokens are stop tokens."""
        return max(2, 1 + len(ends)) * sampling.num_beams

    def take(self, member: Sequence, result: EntryResult) -> bool:
        """Store the likeliest next tokens of the beam ``member``. Returns whether all active beams have next tokens now."""
        self._tops[self.members.index(member)] = result.logprobs[0].top
        return len(self._tops) == len(self.scores)

    def has_token(self, member: Sequence) -> bool:
        """Whether ``member`` has its next tokens and waits for the other beams."""
        return self.members.index(member) in self._tops

    def advance(self) -> FinishReason | None:
        """Continue with the best beams. Returns the finish reason once the search ends."""
        if self.forks.advance(self):
            return None
        first = self.members[0]
        return (
            FinishReason.STOP
            if self.finished
            else first.break_off(no_token_left(first.request, first.num_output_tokens))
        )

    def next_beams(self) -> list[Child]:
        """Choose the next beams, best first, and finish candidates that end; empty when the search is over. The caller
        updates ``scores``."""
        sampling, num_beams = self.sampling, self.sampling.num_beams
        every = (
            (self.scores[index] + logprob, index, token)
            for index, top in sorted(self._tops.items())
            for token, logprob in top.items()
            if logprob > float("-inf")
        )
        best = nlargest(self.num_candidates(sampling, self.ends), every, key=itemgetter(0))
        candidates, self._tops = [Child(*values) for values in best], {}
        if not candidates:  # the request's constraints forbid a next token for every beam
            return []
        length = self.members[candidates[0].parent].num_output_tokens + 1
        running: list[Child] = []
        for place, child in enumerate(candidates):
            if child.token in self.ends or length == self.max_tokens:
                if place < num_beams:  # a finished candidate counts only among the best ``num_beams``
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
        """Whether the best active beam could still beat the worst finished answer."""
        if len(self.finished) < self.sampling.num_beams:
            return True
        if self.sampling.early_stopping is True:
            return False
        if self.sampling.early_stopping == "never" and self.sampling.length_penalty > 0:
            length = self.max_tokens
        return best_score / length**self.sampling.length_penalty > self.finished[-1].score


class BeamForks:
    """Forks KV blocks and queue slots for beams with several children, and releases those of beams without children."""

    def __init__(self, scheduler: Scheduler):
        self._tables, self._queues, self._withdraw = scheduler.tables, scheduler.queues, scheduler.withdraw

    def advance(self, group: BeamGroup) -> bool:
        """Continue each beam with its best child. A beam's other children replace beams without children, and share the blocks of
        their parent. Returns whether any beam has children."""
        children = group.next_beams()
        if not children:
            return False
        next_of, forks = {}, []
        for child in children:
            if child.parent in next_of:
                forks.append(child)
            else:
                next_of[child.parent] = child
        parents, free = list(next_of), [index for index in range(len(group.members)) if index not in next_of]
        self._tables.keep([group.members[index].cache for index in parents], [m.cache for m in group.members])
        for index in free:
            self._withdraw(group.members[index])
        for index, child in zip(free, forks, strict=False):
            next_of[index] = child
            self._fork(group.members[child.parent], group.members[index], child.token)
        for index in parents:
            group.members[index].token_ids.append(next_of[index].token)
        group.scores = {index: child.score for index, child in next_of.items()}
        return True

    def _fork(self, parent: Sequence, member: Sequence, token: int) -> None:
        """Make ``member`` a copy of ``parent`` with ``token`` appended."""
        member.token_ids = [*parent.token_ids, token]
        has_blocks = parent in self._queues.running  # False if the parent was preempted meanwhile
        shared = parent.cache.num_tokens if has_blocks and self._tables.can_share() else 0
        self._tables.share(parent.cache, member.cache, shared)
        if shared:
            self._queues.admit(member)
        else:
            self._queues.enqueue(member)


class BeamSearch:
    """Makes beam groups for requests; implements ``GroupMaker``.

    Args:
        vocab_size: number of token ids.
    """

    def __init__(self, scheduler: Scheduler, options: SchedulerOptions, vocab_size: int):
        self._scheduler, self._options, self._vocab_size = scheduler, options, vocab_size
        self._forks = BeamForks(scheduler)

    def make(
        self,
        request: Request,
        ends: list[int],
        make_sequence: Callable[[int, TokenSampling], Sequence],
    ) -> BeamGroup:
        """Make the beam group of a request."""
        tops = {"logprobs": BeamGroup.num_candidates(request.sampling, ends), "after_processors": True}
        beams = [
            make_sequence(number, msgspec.structs.replace(token_sampling(request, number, ends), **tops))
            for number in range(request.sampling.num_beams)
        ]
        return BeamGroup(
            members=beams, sampling=request.sampling, ends=ends, max_tokens=beams[0].max_tokens, forks=self._forks
        )

    def check(self, request: Request, max_context: int) -> None:
        """Refuse a request whose beams can never run.

        Raises:
            UserError: the beams exceed the sequence slots, the KV cache or the vocabulary.
        """
        sampling, tables = request.sampling, self._scheduler.tables
        if sampling.num_beams > self._options.max_num_seqs:
            raise UserError(f"num_beams {sampling.num_beams} is more than --max-num-seqs {self._options.max_num_seqs}")
        states = tables.states
        if states is not None and sampling.num_beams > states.slots.num_blocks:
            raise UserError(
                f"num_beams {sampling.num_beams} is more than the {states.slots.num_blocks} slots for recurrent "
                "states; lower it, or raise --memory-utilization"
            )
        num_candidates = BeamGroup.num_candidates(sampling, request.ends(self._scheduler.eos_token_ids))
        if num_candidates > self._vocab_size:
            raise UserError(
                f"num_beams {sampling.num_beams} needs {num_candidates} candidate tokens, more than the vocabulary "
                f"of {self._vocab_size}; lower it"
            )
        longest = min(max_context, len(request.prompt_token_ids) + sampling.max_tokens)
        needs = [(sampling.num_beams * tables.blocks.blocks_for(longest), tables.blocks, "KV blocks")]
        if (windows := tables.windows) is not None:
            keeps = self._options.context_shift and not windows.fits_in(
                max_context - self._scheduler.shifted(max_context)[1]
            )
            needed = windows.blocks_for_beams(sampling.num_beams, longest, keeps)
            needs.append((needed, windows.blocks, "KV blocks of sliding-window layers"))
        for needed, pool, what in needs:
            if needed > pool.num_blocks:
                raise UserError(
                    f"{sampling.num_beams} beams of up to {longest} tokens need {needed} {what}, but there are "
                    f"{pool.num_blocks}; lower num_beams or max_tokens"
                )
