"""Speculation: interface through which drafted tokens enter and leave a scheduler's micro-batches; ``Drafts`` implements it."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping

from labinfer.base.plan import BatchPlan
from labinfer.engine.sequence import Sequence


class Speculation:
    """Drafted tokens in the micro-batches of a scheduler. This base class drafts none; a scheduler without speculation uses it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Counters since the start; the scheduler adds its own counters."""

    def propose(
        self,
        chosen: MutableMapping[Sequence, int],
        *,
        decodes: list[Sequence],
        waiting: list[Sequence],
        room: int,
        num_waiting: int,
        eos_token_ids: frozenset[int],
        num_micro_batches: int,
        num_in_flight: int,
    ) -> None:
        """Add drafted tokens to a micro-batch. Called for each micro-batch, once all other tokens are chosen.

        Args:
            chosen: sequence → number of tokens to run; increased by the drafted tokens.
            decodes: sequences in ``chosen`` that may run drafted tokens, too.
            waiting: sequences whose tokens are all in flight; empty unless this micro-batch has no other work.
            room: tokens left in the micro-batch's token budget.
            num_waiting: maximum number of sequences of ``waiting`` to choose.
            num_micro_batches: number of micro-batches that the running sequences are divided into.
            num_in_flight: number of micro-batches in flight now.
        """

    def record_round(self, plan: BatchPlan, sequences: list[Sequence], num_in_flight: int) -> None:
        """Note that a micro-batch has returned its result. Called once for each micro-batch.

        Args:
            sequences: sequences of the plan's entries.
            num_in_flight: number of micro-batches that were in flight, this one included.
        """

    def record_verified(self, sequence: Sequence, positions: tuple[int, ...], num_accepted: int) -> None:
        """Count accepted tokens, and free the cache of rejected ones. Called when ``sequence`` has the sampled tokens.

        Args:
            positions: position in its draft of each drafted token that was in flight: first the ``num_accepted``
                accepted ones, then rejected ones, then unverified ones of later chunks (``sequence.draft``).
        """

    def on_idle(self) -> None:
        """Record that no sequence runs or waits."""

    def forget(self, sequences: list[Sequence]) -> None:
        """Drop the state kept for sequences that have ended."""
