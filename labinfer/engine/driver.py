"""EngineDriver: rank 0's loop over an engine. It handles token ids only; its callers handle text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

from labinfer.base.clock import Clock
from labinfer.base.tracer import Tracer
from labinfer.engine.llm_engine import EngineState, LLMEngine, QueueFull
from labinfer.engine.request import AnswerUpdate, FinishReason, Request
from labinfer.engine.sequence import Sequence

IDLE_SECONDS = 0.01
"""Polling interval for new requests while the engine is idle."""

Owner = Hashable
"""A caller's key of an open request; unique among open requests."""
StepOutputs = list[tuple[Owner, AnswerUpdate]]
"""Answer updates of one step, each with the ``Owner`` key of the request that the answer belongs to."""


class EngineDriver:
    """Feeds requests to an engine, steps it, and gives the outputs of each step to the owners of the requests.

    Args:
        clock: sleeps while there is no request.
        recorder: traces the engine's time.
    """

    def __init__(self, engine: LLMEngine, clock: Clock, recorder: Tracer):
        self.engine, self._clock, self._recorder = engine, clock, recorder
        self._sequences: dict[Owner, list[Sequence]] = {}
        self._owners: dict[int, Owner] = {}  # by ``seq_id``
        self._overflow: tuple[Owner, Request] | None = None  # request refused by a full queue, retried next

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    @property
    def is_broken(self) -> bool:
        """Whether a step failed, so that the ranks no longer agree on what runs."""
        return self.engine.state is EngineState.ERROR

    def is_open(self, owner: Owner) -> bool:
        """Whether this owner's request has not ended."""
        return owner in self._sequences

    def add(self, owner: Owner, request: Request, admitted: bool = False) -> None:
        """Queue a request; never blocks.

        Args:
            admitted: whether the request was queued before, so that a full queue does not refuse it.

        Raises:
            QueueFull: the waiting queue is full; try again when requests have been admitted.
            UserError: the request can never run.
        """
        sequences = self.engine.add_request(request, admitted)
        self._sequences[owner] = sequences
        self._owners |= {sequence.seq_id: owner for sequence in sequences}

    def abort(self, owner: Owner, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request, or its answer ``index``, at once and free its blocks. Does nothing if the request has ended."""
        for sequence in self._sequences.get(owner, ()):
            if index in (None, sequence.choice):
                self.engine.abort(sequence, reason)
        self._forget_if_done(owner)

    def step(self, launches: bool = True) -> StepOutputs:
        """Launch all micro-batches that may start, and wait for the oldest one. Returns [] if none is in flight.

        Args:
            launches: whether to launch micro-batches; False only collects the oldest result.
        """
        with self._recorder.slice("engine"):
            advanced = self.engine.step() if launches else self.engine.poll_result()
        outputs = [(self._owners[sequence.seq_id], sequence.update()) for sequence in advanced]
        for sequence, (owner, _) in zip(advanced, outputs, strict=True):
            if sequence.finish_reason is not None:
                self._forget_if_done(owner)
        return outputs

    def run(
        self, source: Iterable[tuple[Owner, Request] | None], check: Callable[[], None] = lambda: None
    ) -> Iterator[StepOutputs]:
        """Yield the outputs of each step until ``source`` has ended and no request is open.

        Args:
            source: requests with their owners, taken as the waiting queue has room; yields None if it has none yet.
            check: called before every step; may raise ``Interrupted``.
        """
        requests, more = iter(source), True
        self._overflow = None
        while True:
            more = more and self._feed(requests)
            check()
            if self.has_work:
                yield self.step()
            elif more:
                self._clock.sleep(IDLE_SECONDS)
            else:
                return

    def drain(self) -> None:
        """Abort every request, and wait for all micro-batches in flight."""
        self.engine.drain()
        self._sequences.clear()
        self._owners.clear()

    def _feed(self, requests: Iterator[tuple[Owner, Request] | None]) -> bool:
        """Fill the waiting queue up to the number of sequences that may run at once, as a job may have millions of requests.

        Returns whether the source may have more.
        """
        while self.engine.wants_requests:
            try:
                item, self._overflow = self._overflow or next(requests), None
            except StopIteration:
                return False
            if item is None:
                break
            try:
                self.add(*item)
            except QueueFull:
                self._overflow = item
                break
        return True

    def _forget_if_done(self, owner: Owner) -> None:
        sequences = self._sequences.get(owner, [])
        if all(sequence.finish_reason is not None for sequence in sequences):
            self._sequences.pop(owner, None)
            for sequence in sequences:
                del self._owners[sequence.seq_id]
