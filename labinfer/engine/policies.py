"""Scheduling and batch policies: small pure functions, chosen by name. To add one, write it and name it in its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from labinfer.base.registry import REGISTRY
from labinfer.engine.sequence import Sequence

# Which sequence is admitted next, and which one is preempted.

SortKey = tuple[int, ...]
SchedulingPolicy = Callable[[Sequence, Mapping[str, int]], SortKey]
"""Sort key of a sequence, given ``running_of_user``: the number of running sequences of each user.

The waiting sequence with the smallest key is admitted next. When KV blocks run out, the running sequence with the largest key
is preempted. Contract:

- Keys are distinct: end the tuple with ``sequence.order``, the order of arrival. Beams of a request share a key.
- With an empty ``running_of_user`` the key of a sequence is constant from its arrival to its end, preemptions included: it may
  depend on the request (priority, prompt length, ``max_tokens``), but not on how many of its tokens were generated or scheduled.
  With a key that changes, two running sequences could each wait for the other one's blocks. ``RequestQueues`` asserts this.
- With users in ``running_of_user`` the key may depend on their counts, which changes only who is admitted next. Of two sequences
  of one user the same one is first for all counts.
"""


def fcfs(sequence: Sequence, running_of_user: Mapping[str, int]) -> SortKey:
    """First come, first served."""
    return (sequence.order,)


def priority(sequence: Sequence, running_of_user: Mapping[str, int]) -> SortKey:
    """The lowest ``priority`` first, as vLLM has it; first come, first served among equals."""
    return (sequence.request.priority, sequence.order)


def fair(sequence: Sequence, running_of_user: Mapping[str, int]) -> SortKey:
    """The users in turn: the next is the one with the fewest running; first come, first served among equals."""
    return (running_of_user.get(sequence.request.user, 0), sequence.order)


# How the work is split over the micro-batches in flight.


@dataclass(frozen=True, kw_only=True)
class Load:
    """Work at hand when a micro-batch is composed."""

    num_decoding: int
    """Sequences that generate, those whose token is on its way included."""
    prefill_tokens: int
    """Prompt tokens still to run, of running sequences and of waiting ones if the next could be admitted."""
    free_fraction: float
    """Fraction of the KV blocks that are free."""
    num_micro_batches: int
    """Micro-batches in flight at once."""
    max_tokens: int
    """Tokens of one micro-batch at most."""
    was_prefilling: bool
    """Whether the micro-batch before this one ran prompts."""

    @property
    def decode_share(self) -> int:
        """Decodes of one micro-batch when they are dealt evenly."""
        return -(-self.num_decoding // self.num_micro_batches)


@dataclass(frozen=True)
class Budget:
    """Most that a micro-batch may hold."""

    num_decodes: int
    num_prefill_tokens: int


Split = Callable[[Load], Budget]
"""Largest micro-batch that may be composed now, given the work at hand.

Contract: a pure function of its argument, as the planner and the simulator call it too. A budget without room for any work at
hand (``Budget(0, 0)``) waits for a result in flight; with nothing in flight, ``balanced`` composes the micro-batch instead.
"""

MIN_PREFILL_TOKENS = 128
"""Smaller pieces of a prompt cost more in launches than they balance."""
TURNS = 4
"""Turns of the pipeline over which ``throttle`` spreads the prompt tokens at hand. With fewer, a prompt that arrives alone fills
a few micro-batches and leaves the stages waiting for them; with more, first tokens come later."""
LITTLE_FREE, HALF_FREE = 0.1, 0.5
"""Fractions of the KV blocks: below the first prompts stop, below the second they slow down or wait."""


def balanced(load: Load) -> Budget:
    """Decodes dealt evenly over the micro-batches in flight; prompts fill what is left of each."""
    return Budget(load.decode_share, load.max_tokens)


def greedy(load: Load) -> Budget:
    """Every decode that is ready, then prompts up to the limit: one micro-batch takes all, the next finds little."""
    return Budget(load.max_tokens, load.max_tokens)


def throttle(load: Load) -> Budget:
    """Decodes dealt evenly over the micro-batches in flight, and prompt tokens over those of a few turns.

    After gLLM (arXiv:2504.14775). A micro-batch takes a fixed fraction of the prompt tokens that are left, so the next one
    is about as large, whatever arrives. As the KV cache fills, prompts slow down, so that those who run find blocks to go
    on.
    """
    pressure = min(1.0, load.free_fraction / HALF_FREE)
    share = -(-load.prefill_tokens // (TURNS * load.num_micro_batches))
    return Budget(
        num_decodes=load.decode_share,
        num_prefill_tokens=max(MIN_PREFILL_TOKENS, int(share * pressure)),
    )


def phases(load: Load) -> Budget:
    """Prompts until the KV cache is full, then answers until half of it is free (after TD-Pipe, arXiv:2506.10470).

    For offline jobs: stages that run the same kind of work all the time wait less for each other.
    """
    more = load.prefill_tokens > 0
    room = load.free_fraction > (LITTLE_FREE if load.was_prefilling else HALF_FREE)
    if more and (room or not load.num_decoding):
        return Budget(0, load.max_tokens)
    return Budget(load.decode_share, 0)


def choose_split(name: str, num_stages: int, has_steady_state: bool = True) -> Split:
    """The split of this name; ``auto`` is ``throttle`` where several stages are kept busy, and ``balanced`` elsewhere.

    Args:
        has_steady_state: whether the pipeline schedule keeps them busy, see ``PipelineSchedule``.
    """
    if name == "auto":
        name = "throttle" if num_stages > 1 and has_steady_state else "balanced"
    return REGISTRY.find("batch_policy", name)
