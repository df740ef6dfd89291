"""The plain data in which engine and worker meet. No torch here: the engine imports this file.

A plan is a *delta*: a sequence is sent once (``SequenceStart``), later plans only name it. Every rank
keeps the same picture of the running sequences, because every rank sees the same plans in the same order.
"""

from __future__ import annotations

import msgspec

from labinfer.errors import UserError

MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow, and the result is the same."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
NO_TOKEN = -1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen.

    Raises:
        UserError: a field is out of its bounds.
    """

    max_tokens: int = 128
    """Tokens to generate at most."""
    temperature: float = 0.0
    """0 is greedy (as is anything under ``GREEDY_BELOW``); otherwise logits are divided by it."""
    top_p: float = 1.0
    """Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751): the smallest set with this much probability."""
    top_k: int = 0
    """Only the k most likely tokens; 0 or -1 keeps all."""
    seed: int = 0
    """The same seed gives the same tokens on every layout and in every batch (fp32)."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token (for benchmarks)."""

    def __post_init__(self) -> None:
        # msgspec does not convert what Python code passes: LLM users may hand over a string or a list.
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        elif isinstance(self.stop, list) or self.stop is None:
            msgspec.structs.force_setattr(self, "stop", tuple(self.stop or ()))
        elif not isinstance(self.stop, tuple):
            raise UserError(f"stop must be a string or a list of strings, not {self.stop!r:.60}")
        for name, kind in (
            ("max_tokens", int),
            ("top_k", int),
            ("seed", int),
            ("temperature", (int, float)),
            ("top_p", (int, float)),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                raise UserError(f"{name} must be a number, not {value!r}")
        if not 1 <= self.max_tokens <= MAX_COUNT:
            raise UserError(f"max_tokens must be at least 1 (and at most {MAX_COUNT}), not {self.max_tokens}")
        if not 0.0 <= self.temperature <= 100.0:  # also false for NaN
            raise UserError(f"temperature must be from 0 to 100, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not -1 <= self.top_k <= MAX_COUNT:
            raise UserError(f"top_k must be -1 (all), 0 (all) or a count up to {MAX_COUNT}, not {self.top_k}")
        if not 0 <= self.seed <= MAX_SEED:
            raise UserError(f"seed must be from 0 to 2**63-1, not {self.seed}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise UserError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, not {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise UserError(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters, not {text!r:.60}")


class TokenSampling(msgspec.Struct, frozen=True, array_like=True):
    """The part of ``SamplingParams`` that the last stage needs."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence the workers have not seen yet (or have forgotten, when it was preempted)."""

    seq_id: int
    token_ids: list[int]
    num_cached: int
    """Tokens at its beginning whose keys and values are in its blocks already."""
    sampling: TokenSampling


class BatchEntry(msgspec.Struct, frozen=True, array_like=True):
    """What one sequence does in a step: run its next ``num_tokens`` tokens through the model."""

    seq_id: int
    num_tokens: int
    new_blocks: list[int]
    """KV blocks appended to the sequence's block table by this step."""
    new_token: int
    """The token sampled for this sequence since it was last planned, or ``NO_TOKEN``."""
    sample: bool
    """Whether the last of these tokens is the sequence's last, so that a next one is to be sampled."""


class BatchPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """One micro-batch. Entries are in the order of the rows of ``ModelInputBatch``."""

    step_id: int
    starts: list[SequenceStart]
    finished: list[int]
    """Sequences to forget; applied before ``starts``."""
    entries: list[BatchEntry]

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def num_samples(self) -> int:
        return sum(entry.sample for entry in self.entries)


class BatchResult(msgspec.Struct, frozen=True, array_like=True):
    """The tokens sampled by one step, in the order of the plan's entries that sample."""

    step_id: int
    token_ids: list[int]


class Pause(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """The end of a run: followers forget ``finished``, report their ``WorkerStats`` and return to their caller."""

    finished: list[int]


Command = BatchPlan | Pause
"""What rank 0 sends down the control channel."""


class WorkerStats(msgspec.Struct, frozen=True):
    """What one rank did between two pauses. Times in seconds, memory in bytes."""

    rank: int
    stage: int
    tp_rank: int
    num_steps: int
    busy_time: float
    """Time inside the model, sampling included, waiting for other stages excluded."""
    peak_memory: int
    weight_bytes_read: int
