"""Scheduling and batch policies: small pure functions, registered by name in ``base/kinds.py`` or by a plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from labinfer.base.errors import UserError
from labinfer.base.registry import REGISTRY
from labinfer.engine.sequence import Sequence

# Scheduling policies: which waiting sequence is admitted next, and which running one is preempted.

SortKey = tuple[int, ...]
SchedulingPolicy = Callable[[Sequence, Mapping[str, int]], SortKey]
"""Sort key of a sequence, given ``running_of_user``: the number of running sequences of each user.

The waiting sequence with the smallest key is admitted next. When KV blocks run out, the running sequence with the largest key
is preempted. Rank 0 calls the function several times for every micro-batch. Contract:

- Keys are distinct: end the tuple with ``sequence.order``, the order of arrival. Beams of a request share a key.
- With an empty ``running_of_user`` the key of a sequence is constant from its arrival to its end, preemptions included: it may
  depend on the request (priority, prompt length, ``max_tokens``), but not on how many of its tokens were generated or scheduled.
  ``RequestQueues`` asserts this. Reason: the running sequence with the smallest key is never preempted, so it always advances,
  ends and makes room for the next one. With a key that changes, two running sequences could each wait for the other one's blocks.
- With users in ``running_of_user`` the key may depend on their counts, which affects only admission. Two sequences of one user
  keep their order for all counts.

A policy whose order of prompts changes over time adds a second function with the same arguments:

    @register("scheduling_policy", "shortest_prefill", prefill_key=fewest_tokens_left)
    def by_arrival(sequence, running_of_user): ...

``prefill_key`` orders the prompts of a micro-batch, waiting and running ones together: a waiting sequence is admitted,
a running one gets its next chunk. This key may change between micro-batches, for example with ``sequence.num_unscheduled``. It cannot
cause a deadlock, because the constant key still decides alone who is preempted. It can starve a prompt that others overtake forever.
Without it, chunks of running prompts come first, by the constant key, then waiting sequences are admitted.
"""


def check_prefill_key(name: str, policy: SchedulingPolicy, details: Mapping[str, Any]) -> None:
    """Refuse a ``prefill_key`` that cannot be called.

    Raises:
        UserError: it is not callable.
    """
    if not callable(details.get("prefill_key", policy)):
        raise UserError(
            f"prefill_key must be a function of a sequence and running_of_user, not {details['prefill_key']!r:.60}"
        )


def fcfs(sequence: Sequence, running_of_user: Mapping[str, int]) -> SortKey:
    """First come, first served."""
    return (sequence.order,)


def priority(sequence: Sequence, running_of_user: Mapping[str, int]) -> SortKey:
    """Lowest ``priority`` first, as in vLLM; first come, first served among equals."""
    return (sequence.request.priority, sequence.order)


def fair(sequence: Sequence, running_of_user: Mapping[str, int]) -> SortKey:
    """User with the fewest running sequences first; first come, first served among equals."""
    return (running_of_user.get(sequence.request.user, 0), sequence.order)


# Batch policies: how many decodes and prompt tokens a micro-batch may hold.


@dataclass(frozen=True, kw_only=True)
class SchedulerState:
    """State of the scheduler when it composes a micro-batch."""

    num_decoding: int
    """Sequences that generate, including those with a token in flight."""
    prefill_tokens: int
    """Unscheduled prompt tokens of running sequences; also those of waiting sequences if the first one could be admitted now."""
    free_fraction: float
    """Fraction of the KV blocks that are free or evictable."""
    num_micro_batches: int
    """Micro-batches that the pipeline schedule keeps in flight."""
    max_tokens: int
    """Largest number of tokens of one micro-batch."""
    was_prefilling: bool
    """Whether the last micro-batch ran prompt tokens."""

    @property
    def decode_share(self) -> int:
        """Decodes of one micro-batch if they are spread evenly over all micro-batches."""
        return -(-self.num_decoding // self.num_micro_batches)


@dataclass(frozen=True)
class Budget:
    """Maximum numbers of decodes and of prompt tokens in one micro-batch."""

    num_decodes: int
    num_prefill_tokens: int


BatchPolicy = Callable[[SchedulerState], Budget]
"""Bounds of the next micro-batch, given the state of the scheduler.

Contract: a pure function of its argument. Rank 0 calls it for every micro-batch; the planner and the simulator call it without
a model. A budget without room for any available work (such as ``Budget(0, 0)``) postpones the micro-batch until a result returns;
with nothing in flight, ``balanced`` composes the micro-batch instead.
"""

MIN_PREFILL_TOKENS = 128
"""Smallest prompt chunk that ``throttle`` asks for: smaller ones cost more in kernel launches than they balance."""
THROTTLE_ROUNDS = 4
"""Rounds of the pipeline over which ``throttle`` spreads the unscheduled prompt tokens. With fewer rounds, a lone prompt fills a few
micro-batches and leaves bubbles; with more rounds, TTFT grows."""
LOW_WATERMARK, HIGH_WATERMARK = 0.1, 0.5
"""Free fractions of the KV blocks: ``phases`` stops prompts below the low one and resumes them above the high one; ``throttle`` slows prompts
down below the high one."""


def balanced(state: SchedulerState) -> Budget:
    """Decodes dealt evenly over the micro-batches in flight; prompts fill the rest of each."""
    return Budget(state.decode_share, state.max_tokens)


def greedy(state: SchedulerState) -> Budget:
    """All decodes that are ready, then prompts up to the token limit: large micro-batches alternate with small ones."""
    return Budget(state.max_tokens, state.max_tokens)


def throttle(state: SchedulerState) -> Budget:
    """Decodes dealt evenly over the micro-batches of a round, and prompt tokens over the micro-batches of ``THROTTLE_ROUNDS`` rounds.

    After gLLM (arXiv:2504.14775). A micro-batch takes a fixed fraction of the unscheduled prompt tokens, so that micro-batches
    have about equal sizes. As the KV cache fills, prompts slow down and leave blocks to the running sequences.
    """
    pressure = min(1.0, state.free_fraction / HIGH_WATERMARK)
    share = -(-state.prefill_tokens // (THROTTLE_ROUNDS * state.num_micro_batches))
    return Budget(num_decodes=state.decode_share, num_prefill_tokens=max(MIN_PREFILL_TOKENS, int(share * pressure)))


def phases(state: SchedulerState) -> Budget:
    """Prefill until the KV cache is full, then decode until half of it is free (after TD-Pipe, arXiv:2506.10470).

    For offline jobs: stages wait less for each other if all of them run either prompts or decodes for a long time.
    """
    more = state.prefill_tokens > 0
    room = state.free_fraction > (LOW_WATERMARK if state.was_prefilling else HIGH_WATERMARK)
    if more and (room or not state.num_decoding):
        return Budget(0, state.max_tokens)
    return Budget(state.decode_share, 0)


def resolve_batch_policy(name: str, num_stages: int, has_steady_state: bool = True) -> BatchPolicy:
    """Look up a batch policy; ``auto`` is ``throttle`` for several stages in a steady state, else ``balanced``.

    Args:
        has_steady_state: ``PipelineSchedule.has_steady_state``.
    """
    if name == "auto":
        name = "throttle" if num_stages > 1 and has_steady_state else "balanced"
    return REGISTRY.find("batch_policy", name)
