"""AsyncLLMEngine: the engines of a host, as the gateway sees them at the other end of a local socket."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace

from labinfer.engine.request import Request
from labinfer.errors import UserError
from labinfer.gateway.host_link import HostLink
from labinfer.gateway.submission import Cancelled, EngineFailed, EngineGone, QueueIsFull, Submission
from labinfer.link.frames import (
    Abort,
    Accepted,
    Add,
    Attach,
    Bye,
    Draining,
    FromGateway,
    FromHost,
    ModelFacts,
    Refused,
    Stats,
    Trace,
    Updates,
    Watch,
)
from labinfer.link.stats import EngineStats
from labinfer.outputs import RequestState
from labinfer.text.tokenizer import Tokenizer


class AsyncLLMEngine:
    """The engines of the host that is attached, for any number of requests at once.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._link: HostLink | None = None
        self._submissions: set[Submission] = set()  # that may be cancelled
        self._open: dict[str, tuple[Submission, int]] = {}  # by the key of a request, with its number
        self._keys = itertools.count()  # ids may be chosen by callers, and two may choose the same
        self._ending: Exception | None = None  # what ended all that was open, until another host comes
        self.is_draining = False
        """Whether the host has said that it will end."""
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None
        """Called with the stats of each engine as they come."""
        self.on_trace: Callable[[Trace], None] = lambda trace: None
        """Called with what the ranks did, between ``watch(True)`` and ``watch(False)``."""
        self.on_attach: Callable[[list[ModelFacts]], None] = lambda models: None
        """Called when a host has loaded its models."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when a host has come."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when nothing more comes from it."""

    async def run(self, link: HostLink) -> None:
        """Carry frames to and fro until the host says goodbye.

        Raises:
            BrokenLink: it has ended without.
        """
        self._link, self._ending, self.is_draining = link, None, False
        writer = asyncio.create_task(link.write())
        ending: Exception = EngineFailed("the engine has failed")
        try:
            self.on_begin()
            while True:
                for frame in await link.receive():
                    if isinstance(frame, Bye):
                        ending = EngineGone("the server is shutting down")
                        return
                    self._take(frame)
        finally:
            writer.cancel()
            link.close()
            self._link, self._ending = None, ending
            for submission in list(self._submissions):
                submission.fail(ending)
            self.on_end()

    def submission(self, *, id: str, model: str, owner: str, seconds: float) -> Submission:
        """A submission, yet to be opened and started; ``close`` it in any case. For its arguments see ``Submission``."""
        submission = Submission(self, id=id, model=model, owner=owner, seconds=seconds)
        self._submissions.add(submission)
        if self._ending is not None:
            submission.fail(self._ending)
        return submission

    def cancel(self, id: str, owner: str) -> bool:
        """End the requests with this id, if they are open and this owner's; returns whether they were."""
        matches = [submission for submission in self._submissions if (submission.id, submission.owner) == (id, owner)]
        for submission in matches:
            submission.fail(Cancelled("the request was cancelled"))
        return bool(matches)

    def watch(self, on: bool) -> None:
        """Have the ranks tell of their steps from now on, or no longer."""
        self._tell(Watch(on))

    # For submissions.

    def open(self, requests: list[Request], tokenizer: Tokenizer | None, streams: bool, id: str) -> list[RequestState]:
        """The state of each request, with a key that no other has."""
        return [
            RequestState(replace(request, key=f"{next(self._keys)}:{id}"), tokenizer, streams, self._clock)
            for request in requests
        ]

    def start(self, submission: Submission) -> None:
        """Hand its requests to the host."""
        for number, opened in enumerate(submission.opened):
            self._open[opened.request.key] = (submission, number)
            self._tell(Add(submission.model, opened.request))

    def end(self, submission: Submission) -> None:
        """Forget it, and let the engine do so where it goes on."""
        self._submissions.discard(submission)
        for opened in submission.opened:
            if self._open.pop(opened.request.key, None) is not None and not opened.is_done:
                self._tell(Abort(opened.request.key))

    # Frames.

    def _tell(self, frame: FromGateway) -> None:
        if self._link is not None:  # else all that was open has failed, and there is nobody to tell
            self._link.send(frame)

    def _take(self, frame: FromHost) -> None:
        if isinstance(frame, Updates):
            for key, update in frame.answers:
                submission, number = self._open.get(key, (None, 0))
                if submission is not None and submission.update(number, update):
                    self._tell(Abort(key, update.index))
        elif isinstance(frame, Accepted):
            if frame.request_id in self._open:
                self._open[frame.request_id][0].accept()
        elif isinstance(frame, Refused):
            if frame.request_id in self._open:
                submission, _ = self._open.pop(frame.request_id)
                submission.fail((QueueIsFull if frame.queue_is_full else UserError)(frame.message))
        elif isinstance(frame, Stats):
            for stats in frame.engines:
                self.on_stats(stats)
        elif isinstance(frame, Trace):
            self.on_trace(frame)
        elif isinstance(frame, Attach):
            self.on_attach(frame.models)
        elif isinstance(frame, Draining):
            self.is_draining = True
