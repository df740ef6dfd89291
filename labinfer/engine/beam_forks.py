"""BeamForks: blocks and places in the queues of beams, as some go on in several children and others in none."""

from __future__ import annotations

from collections.abc import Callable

from labinfer.engine.beam_search import BeamGroup
from labinfer.engine.block_tables import BlockTables
from labinfer.engine.queues import RequestQueues
from labinfer.engine.sequence import Sequence


class BeamForks:
    """Lets the beams of a request go on.

    Args:
        withdraw: takes a sequence out of the queues, and has the workers forget it.
    """

    def __init__(self, tables: BlockTables, queues: RequestQueues, withdraw: Callable[[Sequence], None]):
        self._tables, self._queues, self._withdraw = tables, queues, withdraw

    def advance(self, group: BeamGroup) -> bool:
        """Each beam goes on with its best child; its others take the place of beams without any, sharing its blocks. Returns
        whether there are any children."""
        children = group.advance()
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
