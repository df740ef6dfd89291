"""Beam search: the few continuations with the most probability, by the rules of Transformers' ``generate``."""

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
    """A beam one token longer."""

    score: float
    """Sum of its tokens' log-probabilities."""
    parent: int
    token: int


@dataclass(eq=False, kw_only=True)
class BeamGroup:
    """The beams of one request, and the answers they have come to. It is advanced when every beam has its next token.

    Args:
        members: as many as beams; the first one runs the prompt.
        ends: tokens that end an answer.
        max_tokens: length at which every answer ends.
        forks: blocks of the members.
    """

    members: list[Sequence]
    sampling: SamplingParams
    ends: Collection[int]
    max_tokens: int
    forks: BeamForks | None = None
    scores: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    """Sums of log-probabilities, by the index of each member that is a beam now."""
    finished: list[FinishedBeam] = field(default_factory=list)
    """Answers so far, the best first."""
    _tops: dict[int, dict[int, float]] = field(default_factory=dict)

    @staticmethod
    def num_candidates(sampling: SamplingParams, ends: Collection[int]) -> int:
        """Tokens that are looked at, over all beams: enough to go on with where each one's likeliest ones end it."""
        return max(2, 1 + len(ends)) * sampling.num_beams

    def take(self, member: Sequence, result: EntryResult) -> bool:
        """Take a beam's likeliest next tokens with their log-probabilities. Returns whether all beams have theirs."""
        self._tops[self.members.index(member)] = result.logprobs[0].top
        return len(self._tops) == len(self.scores)

    def has_token(self, member: Sequence) -> bool:
        """Whether this beam waits for the others."""
        return self.members.index(member) in self._tops

    def advance(self) -> FinishReason | None:
        """Go on with the best beams. Returns why the search ends, if it does."""
        if self.forks.advance(self):
            return None
        first = self.members[0]
        return (
            FinishReason.STOP
            if self.finished
            else first.break_off(no_token_left(first.request, first.num_output_tokens))
        )

    def next_beams(self) -> list[Child]:
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


class BeamForks:
    """Blocks and places in the queues of beams, as some go on in several children and others in none."""

    def __init__(self, scheduler: Scheduler):
        self._tables, self._queues, self._withdraw = scheduler.tables, scheduler.queues, scheduler.withdraw

    def advance(self, group: BeamGroup) -> bool:
        """Each beam goes on with its best child; its others take the place of beams without any, sharing its blocks. Returns
        whether there are any children."""
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
        """``member`` becomes what ``parent`` is, with another next token."""
        member.token_ids = [*parent.token_ids, token]
        has_blocks = parent in self._queues.running  # it may have been preempted meanwhile
        shared = parent.cache.num_tokens if has_blocks and self._tables.can_share() else 0
        self._tables.share(parent.cache, member.cache, shared)
        if shared:
            self._queues.admit(member)
        else:
            self._queues.enqueue(member)


class BeamSearch:
    """Beam searches of an engine's requests, see ``GroupMaker``.

    Args:
        vocab_size: ids that a token may have.
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
        """The beams of a request."""
        tops = {"logprobs": BeamGroup.num_candidates(request.sampling, ends), "after_processors": True}
        beams = [
            make_sequence(number, msgspec.structs.replace(token_sampling(request, number, ends), **tops))
            for number in range(request.sampling.num_beams)
        ]
        return BeamGroup(
            members=beams, sampling=request.sampling, ends=ends, max_tokens=beams[0].max_tokens, forks=self._forks
        )

    def check(self, request: Request, max_context: int) -> None:
        """Raises:
        UserError: there is no room for so many beams of this length.
        """
        sampling, tables = request.sampling, self._scheduler.tables
        if sampling.num_beams > self._options.max_num_seqs:
            raise UserError(f"num_beams {sampling.num_beams} is more than --max-num-seqs {self._options.max_num_seqs}")
        states = tables.states
        if states is not None and sampling.num_beams > states.slots.num_blocks:
            raise UserError(
                f"num_beams {sampling.num_beams} is more than the {states.slots.num_blocks} sequences whose states there is "
                "room for; lower it, or raise --memory-utilization"
            )
        num_candidates = BeamGroup.num_candidates(sampling, request.ends(self._scheduler.eos_token_ids))
        if num_candidates > self._vocab_size:
            raise UserError(
                f"num_beams {sampling.num_beams} looks at {num_candidates} tokens, more than the vocabulary of "
                f"{self._vocab_size}; lower it"
            )
        longest = min(max_context, len(request.prompt_token_ids) + sampling.max_tokens)
        needs = [(sampling.num_beams * tables.blocks.blocks_for(longest), tables.blocks, "KV blocks")]
        if (windows := tables.windows) is not None:
            keeps = self._options.context_shift and not windows.fits_in(
                max_context - self._scheduler.shifted(max_context)[1]
            )
            needed = windows.blocks_for_beams(sampling.num_beams, longest, keeps)
            needs.append((needed, windows.blocks, "KV blocks of windowed layers"))
        for needed, pool, what in needs:
            if needed > pool.num_blocks:
                raise UserError(
                    f"{sampling.num_beams} beams of up to {longest} tokens need {needed} {what}, but there are "
                    f"{pool.num_blocks}; lower num_beams or max_tokens"
                )
