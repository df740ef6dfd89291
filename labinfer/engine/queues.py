"""RequestQueues: waiting and running sequences in the order of the scheduling policy; slots for beams that are still to come."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator

from labinfer.engine.beam_search import BeamGroup
from labinfer.engine.policies import SchedulingPolicy, SortKey
from labinfer.engine.sequence import Sequence


class RequestQueues:
    """Sequences that wait, and those that run.

    Args:
        policy: sorts both queues.
        num_slots: sequences that may run at once.
        clock: seconds that never go back.
    """

    def __init__(self, policy: SchedulingPolicy, num_slots: int, clock: Callable[[], float]):
        self._policy, self._num_slots, self._clock = policy, num_slots, clock
        self.waiting: list[Sequence] = []  # by sort key
        self.running: list[Sequence] = []  # by sort key
        self._beam_groups: list[BeamGroup] = []  # admitted, each with a slot for every beam

    def enqueue(self, sequence: Sequence) -> None:
        """Insert a new or preempted sequence into the waiting queue."""
        if sequence.arrival is None:
            sequence.arrival = self._clock()
        insort(self.waiting, sequence, key=self._sort_key)

    def admit(self, sequence: Sequence) -> None:
        """Move a waiting sequence, or a forked beam, to the running queue."""
        if sequence.queue_seconds is None and sequence.arrival is not None:  # a beam's copy never came
            sequence.queue_seconds = self._clock() - sequence.arrival
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if self._is_new_group(sequence):
            self._beam_groups.append(sequence.beams)
        insort(self.running, sequence, key=self._sort_key)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of both queues."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def end_group(self, group: BeamGroup) -> None:
        """Free the slots of a search's beams."""
        if group in self._beam_groups:
            self._beam_groups.remove(group)

    def has_slot(self, sequence: Sequence) -> bool:
        """Whether a slot is free for it, and for all its beams if it is the first."""
        if not self._beam_groups and sequence.beams is None:
            return len(self.running) < self._num_slots
        taken = sum(s.beams is None for s in self.running) + sum(len(group.members) for group in self._beam_groups)
        needed = 1 if sequence.beams is None else len(sequence.beams.members) * self._is_new_group(sequence)
        return taken + needed <= self._num_slots

    def candidates(self) -> Iterator[Sequence]:
        """Sequences that wait for room, the next one first; the caller admits each one before it asks for another.

        A preempted beam comes before all others: its slot is kept, and other beams may be idle until it has its token.
        """
        queues: dict[str | None, deque[Sequence]] = {}
        for sequence in self.waiting:  # by sort key, so that only each queue's first can be next
            group = sequence.beams
            if group is None or self._is_new_group(sequence):
                queues.setdefault(sequence.request.user, deque()).append(sequence)
            elif not group.has_token(sequence):
                queues.setdefault(None, deque()).append(sequence)
        if None in queues:
            yield from queues.pop(None)
        running_of_user = Counter(sequence.request.user for sequence in self.running)
        while queues:
            heads = (queue[0] for queue in queues.values())
            sequence = min(heads, key=lambda head: self._policy(head, running_of_user))
            yield sequence
            user = sequence.request.user
            queues[user].popleft()
            if not queues[user]:
                del queues[user]
            running_of_user[user] += 1

    def victim(self, sequence: Sequence, chosen: Collection[Sequence]) -> Sequence | None:
        """The idle sequence (not in flight, not ``chosen``) with the largest sort key, if it is larger than that of ``sequence``."""
        key = self._sort_key(sequence)
        for victim in reversed(self.running):
            if self._sort_key(victim) <= key:
                return None
            if not victim.num_in_flight and victim not in chosen:
                return victim
        return None

    def _sort_key(self, sequence: Sequence) -> SortKey:
        """Sort key in both queues; asserts that it is the one that the sequence came with."""
        key = self._policy(sequence, {})
        if sequence.sort_key is None:
            sequence.sort_key = key
        assert key == sequence.sort_key, (
            f"the scheduling policy {getattr(self._policy, '__name__', self._policy)!r} gave request {sequence.order} the sort key "
            f"{sequence.sort_key} and later {key}; a key must stay the same until the request ends (see engine/policies.py)"
        )
        return key

    def _is_new_group(self, sequence: Sequence) -> bool:
        return sequence.beams is not None and sequence.beams not in self._beam_groups
