"""RequestQueues: waiting and running sequences in the order of the scheduling policy, with queue slots reserved for beams."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator

from labinfer.engine.policies import SchedulingPolicy, SortKey
from labinfer.engine.sequence import Sequence, SequenceGroup


class RequestQueues:
    """Waiting and running sequences.

    Args:
        policy: sorts both queues.
        num_slots: maximum number of running sequences.
        clock: monotonic seconds.
        prefill_key: orders prompts for the next micro-batch, see ``SchedulingPolicy``; None to use ``policy``.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        num_slots: int,
        clock: Callable[[], float],
        prefill_key: SchedulingPolicy | None = None,
    ):
        self._policy, self._num_slots, self._clock, self._prefill_key = policy, num_slots, clock, prefill_key
        self.waiting: list[Sequence] = []  # by sort key
        self.running: list[Sequence] = []  # by sort key
        self._groups: list[SequenceGroup] = []  # admitted groups: a slot is reserved for every member

    def enqueue(self, sequence: Sequence) -> None:
        """Insert a new or preempted sequence into the waiting queue."""
        if sequence.arrival is None:
            sequence.arrival = self._clock()
        insort(self.waiting, sequence, key=self._sort_key)

    def admit(self, sequence: Sequence) -> None:
        """Move a waiting sequence, or a new member of a group, to the running queue."""
        if sequence.queue_seconds is None and sequence.arrival is not None:  # a forked beam has no arrival
            sequence.queue_seconds = self._clock() - sequence.arrival
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if self._is_new_group(sequence):
            self._groups.append(sequence.group)
        insort(self.running, sequence, key=self._sort_key)

    def withdraw(self, sequence: Sequence) -> None:
        """Remove a sequence from both queues."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def end_group(self, group: SequenceGroup) -> None:
        """Free the queue slots that are reserved for the members of a group."""
        if group in self._groups:
            self._groups.remove(group)

    def has_slot(self, sequence: Sequence) -> bool:
        """Whether a queue slot is free for ``sequence``, or queue slots for all members of its group if the group is new."""
        if not self._groups and sequence.group is None:
            return len(self.running) < self._num_slots
        taken = sum(s.group is None for s in self.running) + sum(len(group.members) for group in self._groups)
        needed = 1 if sequence.group is None else len(sequence.group.members) * self._is_new_group(sequence)
        return taken + needed <= self._num_slots

    @property
    def next_waiting(self) -> Sequence | None:
        """Waiting sequence that comes first if the fairness between users is ignored; None if none waits."""
        if self._prefill_key is None or not self.waiting:
            return self.waiting[0] if self.waiting else None
        return min(self.waiting, key=lambda sequence: self._prefill_key(sequence, {}))

    def prompts(self, prefilling: list[Sequence]) -> Iterator[Sequence]:
        """Running prompts (``prefilling``) and waiting sequences (``candidates``), in the order in which they get
        prompt tokens of the next micro-batch."""
        if self._prefill_key is None:
            yield from prefilling
            yield from self.candidates()
        else:
            running_of_user = self._count_users()

            def key(sequence: Sequence) -> SortKey:
                return self._prefill_key(sequence, running_of_user)

            yield from heapq.merge(sorted(prefilling, key=key), self.candidates(), key=key)

    def candidates(self) -> Iterator[Sequence]:
        """Yield waiting sequences in the order of admission. Ends once the caller does not admit the yielded sequence.

        A preempted beam comes before all others: its slot is kept, and other beams may be idle until this beam has its token.
        """
        if not self.waiting or len(self.running) >= self._num_slots:
            return
        beams: list[Sequence] = []
        queues: dict[str, deque[Sequence]] = {}
        for sequence in self.waiting:  # sorted by key, so only the first of each queue can be next
            group = sequence.group
            if group is None or self._is_new_group(sequence):
                queues.setdefault(sequence.request.user, deque()).append(sequence)
            elif not group.has_token(sequence):
                beams.append(sequence)
        for sequence in beams:
            yield sequence
            if not sequence.cache.blocks:
                return
        running_of_user, policy = self._count_users(), self._prefill_key or self._policy

        def key(sequence: Sequence) -> SortKey:
            return policy(sequence, running_of_user)

        if self._prefill_key is not None:
            queues = {user: deque(sorted(queue, key=key)) for user, queue in queues.items()}
        while queues:
            sequence = min((queue[0] for queue in queues.values()), key=key)
            yield sequence
            if not sequence.cache.blocks:
                return
            user = sequence.request.user
            queues[user].popleft()
            if not queues[user]:
                del queues[user]
            running_of_user[user] += 1

    def victim(self, sequence: Sequence, chosen: Collection[Sequence]) -> Sequence | None:
        """The idle sequence (not in flight, not ``chosen``) with the largest sort key, if that key is larger than the key of ``sequence``."""
        key = self._sort_key(sequence)
        for victim in reversed(self.running):
            if self._sort_key(victim) <= key:
                return None
            if not victim.num_in_flight and victim not in chosen:
                return victim
        return None

    def _count_users(self) -> Counter[str]:
        """Running sequences of each user."""
        return Counter(sequence.request.user for sequence in self.running)

    def _sort_key(self, sequence: Sequence) -> SortKey:
        """Sort key in both queues; asserts that it has not changed since the sequence arrived."""
        key = self._policy(sequence, {})
        if sequence.sort_key is None:
            sequence.sort_key = key
        assert key == sequence.sort_key, (
            f"the scheduling policy {getattr(self._policy, '__name__', self._policy)!r} gave request {sequence.order} the sort key "
            f"{sequence.sort_key} and later {key}; a key must stay the same until the request ends (see engine/policies.py)"
        )
        return key

    def _is_new_group(self, sequence: Sequence) -> bool:
        return sequence.group is not None and sequence.group not in self._groups
