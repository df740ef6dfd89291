"""Rank 0's side of serving: the gateway's requests through the engines of one or more models."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from labinfer.engine.llm_engine import QueueFull
from labinfer.engine.request import FinishReason
from labinfer.engine.sequence import Sequence
from labinfer.errors import BrokenLink, Interrupted, UserError
from labinfer.llm import LLM
from labinfer.plan import WorkerStats
from labinfer.recommended_sampling import recommended_sampling
from labinfer.server.frames import (
    Abort,
    Accepted,
    Add,
    Bye,
    Draining,
    FrameReader,
    FromEngine,
    FromGateway,
    Ready,
    Refused,
    ServedModel,
    Stats,
    Updates,
    pack,
)
from labinfer.server.stats import NUM_STEP_BUCKETS, EngineStats, RankStats, step_bucket

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
MAX_CHUNKS = 16
"""That are read between two steps."""
IDLE_SECONDS = 0.25
"""How long rank 0 sleeps at a time when nothing runs; a frame wakes it at once, a signal at the latest after this."""
STATS_SECONDS = 1.0
"""Between figures for the gateway, while something runs."""
STATS_AT_REST = 2
"""How often they are sent when nothing runs any more: the other ranks' come with the second."""


class EngineLink:
    """Rank 0's end of the socket."""

    def __init__(self, connection: socket.socket):
        self._socket, self._reader = connection, FrameReader(FromGateway)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, frame: FromEngine) -> None:
        """Raises:
        BrokenLink: the gateway is gone.
        """
        try:
            self._socket.sendall(pack(frame))
        except OSError as error:
            raise BrokenLink(f"no word reaches the gateway process: {error}") from None

    def receive(self, seconds: float) -> list[FromGateway]:
        """What has come, after sleeping so long for it if there is nothing yet.

        Raises:
            BrokenLink: the gateway is gone.
        """
        frames: list[FromGateway] = []
        for _ in range(MAX_CHUNKS):
            if not self._poll.poll(1e3 * seconds):
                break
            try:
                data = self._socket.recv(CHUNK_BYTES)
            except OSError as error:
                raise BrokenLink(f"the gateway process is gone: {error}") from None
            if not data:
                raise BrokenLink("the gateway process has ended")
            frames += self._reader.feed(data)
            seconds = 0.0
        return frames


@dataclass
class Served:
    """A model and what runs on it."""

    name: str
    llm: LLM
    recommended: dict[str, float]
    """Sampling, by the checkpoint."""
    sequences: dict[str, list[Sequence]] = field(default_factory=dict)
    """Of each open request."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    step_tokens: int = 0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * NUM_STEP_BUCKETS)
    last_step: float = 0.0
    """When the last one came back, or work came to the idle engine."""
    working_seconds: float = 0.0

    def step(self) -> list[Sequence]:
        """Returns the sequences that got something."""
        engine, recorder = self.llm.engine, self.llm.parts.recorder
        with recorder.slice("engine"):
            advanced = engine.step()
        plan = engine.last_plan
        if plan is not None:
            self.num_steps += 1
            self.step_tokens += plan.num_tokens
            self.steps_by_tokens[step_bucket(plan.num_tokens)] += 1
        for sequence in advanced:
            pooled = sequence.embedding is not None
            self.generation_tokens += not pooled
            if pooled or (sequence.num_output_tokens == 1 and sequence.choice == 0):
                self.prompt_tokens += sequence.num_prompt_tokens
        now = time.monotonic()
        self.working_seconds += now - self.last_step
        self.last_step = now
        return advanced

    def describe(self) -> ServedModel:
        parts, options = self.llm.parts, self.llm.options
        return ServedModel(
            self.name,
            str(
                Path(options.model.tokenizer or parts.directory).resolve()
            ),  # the gateway has another working directory
            bool(options.model.tokenizer),
            self.recommended,
            parts.layout.config.vocab_size,
            parts.layout.config.hidden_size,
            parts.layout.max_model_len,
            options.scheduler.context_shift,
        )


class EngineHost:
    """Steps the engines as long as there is work, and sleeps when there is none.

    Args:
        models: by the names under which they are served; all of one group.
        check: raises ``Interrupted`` when a signal has asked for the end.
        drain_seconds: how long open requests may go on then.

    Raises:
        UserError: what a checkpoint recommends cannot be read.
    """

    def __init__(
        self, models: dict[str, LLM], connection: socket.socket, check: Callable[[], None], drain_seconds: float
    ):
        self._served = {
            name: Served(name, llm, recommended_sampling(llm.parts.directory) or {}) for name, llm in models.items()
        }
        self._link = EngineLink(connection)
        self._check, self._drain_seconds = check, drain_seconds
        self._model_of: dict[str, Served] = {}
        self._lifeline = next(iter(models.values())).group.lifeline
        self._drain_until: float | None = None
        self._was_working = False
        self._next_stats, self._stats_left = 0.0, STATS_AT_REST
        self._decode = msgspec.msgpack.Decoder(list[WorkerStats]).decode

    def run(self) -> None:
        """Until a signal comes and what was open then is done, or has had its time.

        Raises:
            BrokenLink: the gateway is gone.
        """
        self._link.send(Ready([served.describe() for served in self._served.values()]))
        while not self._is_over():
            working = [served for served in self._served.values() if served.llm.engine.has_work]
            for frame in self._link.receive(0.0 if working else IDLE_SECONDS):
                self._handle(frame)
            for served in working:
                self._step(served)
            self._send_stats(bool(working))
        for served in self._served.values():
            served.llm.engine.drain()
        self._link.send(Bye())

    def _is_over(self) -> bool:
        if self._drain_until is None:
            try:
                self._check()
            except Interrupted:
                self._drain_until = time.monotonic() + self._drain_seconds
                self._link.send(Draining(self._drain_seconds))
                if self._model_of:
                    count = len(self._model_of)
                    what = "1 request is open; it has" if count == 1 else f"{count} requests are open; they have"
                    logger.info("%s %g seconds to end. A second signal ends all at once", what, self._drain_seconds)
            return False
        return not self._model_of or time.monotonic() > self._drain_until

    def _handle(self, frame: FromGateway) -> None:
        if isinstance(frame, Add):
            self._add(frame)
        elif isinstance(frame, Abort):
            self._abort(frame)

    def _add(self, frame: Add) -> None:
        served, request_id = self._served[frame.model], frame.request.key
        if not served.llm.engine.has_work:
            served.last_step = time.monotonic()
        try:
            served.llm.check_processors(frame.request)  # the engine checks the rest
            served.sequences[request_id] = served.llm.engine.add_request(frame.request)
        except QueueFull as error:
            self._link.send(Refused(request_id, str(error), queue_is_full=True))
            return
        except UserError as error:
            self._link.send(Refused(request_id, str(error)))
            return
        self._model_of[request_id] = served
        self._link.send(Accepted(request_id))

    def _abort(self, frame: Abort) -> None:
        served = self._model_of.get(frame.request_id)
        if served is None:  # it has just ended by itself
            return
        for sequence in served.sequences[frame.request_id]:
            if frame.index in (None, sequence.choice):
                served.llm.engine.abort(sequence, FinishReason.ABORT)
        self._forget_if_done(served, frame.request_id)

    def _step(self, served: Served) -> None:
        engine = served.llm.engine
        if not engine.has_work:  # a frame has ended what there was
            return
        advanced = served.step()
        if advanced:
            self._link.send(Updates([(sequence.request.key, sequence.update()) for sequence in advanced]))
        for sequence in advanced:
            if sequence.finish_reason is not None:
                self._forget_if_done(served, sequence.request.key)
        if not engine.has_work:
            assert engine.blocks.num_free == engine.blocks.num_blocks, "an idle engine holds KV blocks"

    def _forget_if_done(self, served: Served, request_id: str) -> None:
        sequences = served.sequences.get(request_id, [])
        if all(sequence.finish_reason is not None for sequence in sequences):
            served.sequences.pop(request_id, None)
            self._model_of.pop(request_id, None)

    # Figures.

    def _send_stats(self, is_working: bool) -> None:
        now = time.monotonic()
        if is_working != self._was_working:
            self._was_working, self._next_stats = is_working, now
        self._stats_left = STATS_AT_REST if is_working else self._stats_left
        if now < self._next_stats or not self._stats_left:
            return
        self._next_stats = now + STATS_SECONDS
        self._stats_left -= 1
        reports = {0: [served.llm.parts.stats.peek() for served in self._served.values()]}
        if self._lifeline is not None:
            reports |= {rank: self._decode(data) for rank, data in sorted(self._lifeline.reports.items()) if data}
            self._lifeline.ask_reports()  # for the next time
        stats = [
            _describe(served, [report[number] for report in reports.values()], now)
            for number, served in enumerate(self._served.values())
        ]
        self._link.send(Stats(stats))


def _describe(served: Served, ranks: list[WorkerStats], now: float) -> EngineStats:
    engine = served.llm.engine
    counts = engine.scheduler.counts
    return EngineStats(
        model=served.name,
        running=len(engine.scheduler.running),
        waiting=len(engine.scheduler.waiting),
        kv_usage=engine.blocks.usage,
        prefix_cache_queries=counts["looked_up"],
        prefix_cache_hits=counts["found"],
        num_preemptions=counts["preemptions"],
        prompt_tokens=served.prompt_tokens,
        generation_tokens=served.generation_tokens,
        num_steps=served.num_steps,
        step_age=now - served.last_step if engine.has_work else 0.0,
        steps_by_tokens=served.steps_by_tokens,
        step_tokens=served.step_tokens,
        ranks=[
            RankStats(
                one.rank,
                one.stage,
                one.tp_rank,
                one.num_steps,
                one.busy_time,
                max(0.0, served.working_seconds - one.busy_time),
                one.bytes_sent,
                one.private_memory,
                one.peak_memory,
            )
            for one in ranks
        ],
    )
