"""AsyncLLMEngine: the engines of a host, as the gateway sees them at the other end of a local socket."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from labinfer.base.heartbeat import DEFAULT_TIMEOUT, Wait
from labinfer.engine.request import Request
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ApiError
from labinfer.requests.outputs import RequestState
from labinfer.server.gateway.admission_control import LOADING_SECONDS, RETRY_SECONDS
from labinfer.server.gateway.host_connection import HostConnection
from labinfer.server.gateway.open_requests import EngineTask, OpenRequests
from labinfer.server.link.frames import (
    Accepted,
    Attach,
    ChangeLayout,
    Draining,
    FromGateway,
    FromHost,
    Heartbeat,
    LayoutAnswer,
    ModelInfo,
    Paused,
    Ready,
    Rebuilding,
    Refused,
    Shutdown,
    StatsUpdate,
    Trace,
    Updates,
    Watch,
)
from labinfer.server.link.layout_change import LayoutChange
from labinfer.server.link.stats import EngineStats
from labinfer.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TOLD_WAIT_SECONDS = 5.0
"""Waits that are shorter are told to nobody: a long prompt takes such a time."""
ENGINE_HAS_FAILED = "the engine has failed, and the server ends; send the request to another one, or try again later"


class AsyncLLMEngine:
    """The engines of the host that is attached, for any number of requests at once.

    Args:
        clock: seconds that never go back.
        outlives_host: what is open when a host dies goes on with the next one; else it fails.
        stall_seconds: time without a step, while requests are open, after which the engine counts as stalled.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        outlives_host: bool = False,
        stall_seconds: float = DEFAULT_TIMEOUT,
    ):
        self._clock, self._outlives_host, self._stall_seconds = clock, outlives_host, stall_seconds
        self._num_steps = 0  # of all engines
        self._last_progress = clock()  # when a step ended, or work came to an idle engine
        self._wait: tuple[Wait, float] | None = None  # of rank 0 in its last frame, and when that came
        self._link: HostConnection | None = None
        self._tasks: set[EngineTask] = set()  # that may be cancelled
        self._requests = OpenRequests(self._tell)
        self._models: list[ModelInfo] = []  # of the models of the last host that was ready
        self._keys = itertools.count()  # ids may be chosen by callers, and two may choose the same
        self._ending: ApiError | None = None  # what ended all that was open, until another host comes
        self.is_draining = False
        """Whether the host has said that it will end."""
        self._awaits_host = False  # one has died, and what is open waits for another
        self.is_rebuilding = False
        """Whether the models are loaded again in another layout, and what is open waits for that."""
        self._change: asyncio.Future[LayoutAnswer] | None = None  # of the layout, for whoever has asked for it
        self._awaits_outcome = False  # of a change, whoever has asked for it
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None
        """Called with the stats of each engine as they come."""
        self.on_trace: Callable[[Trace], None] = lambda trace: None
        """Called with what the ranks did, between ``watch(True)`` and ``watch(False)``."""
        self.on_attach: Callable[[list[ModelInfo]], None] = lambda models: None
        """Called when a host has loaded its models."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when a host has come."""
        self.on_end: Callable[[bool], None] = lambda is_final: None
        """Called when nothing more comes from it, with whether its models are gone, too."""

    async def run(self, link: HostConnection) -> None:
        """Carry frames to and fro until the host says goodbye.

        Raises:
            BrokenConnection: it has ended without.
        """
        self._link, self._ending, self.is_draining = link, None, False
        tasks = [asyncio.create_task(link.write()), asyncio.create_task(link.watch())]
        ending: ApiError | None = None if self._outlives_host else api_errors.engine_failed(ENGINE_HAS_FAILED)
        try:
            self.on_begin()
            while True:
                for frame in await link.receive():
                    if isinstance(frame, Shutdown):
                        ending = api_errors.draining(RETRY_SECONDS)
                        return
                    self._take(frame)
        finally:
            for task in tasks:
                task.cancel()
            link.close()
            self._link = self._wait = None
            self.is_rebuilding = self._awaits_outcome = False
            self._requests.end(sum(model.max_num_seqs for model in self._models))
            if self._change is not None and not self._change.done():
                self._change.set_exception(api_errors.engine_failed("the engine has ended while it changed its layout"))
            self._awaits_host = ending is None and bool(self._models)
            if ending is not None:
                self._fail(ending)
            self.on_end(not self._awaits_host)

    @property
    def is_recovering(self) -> bool:
        """Whether a host has died, and not all that was open then goes on with another."""
        return self._awaits_host or self._requests.is_trying

    @property
    def has_work(self) -> bool:
        """Whether requests are open."""
        return self._requests.any_open

    @property
    def is_stalled(self) -> bool:
        """Whether the host is silent, or gives signs of life but ends no step though requests are open."""
        takes_steps = self._link is not None and self._models and not (self._awaits_host or self.is_rebuilding)
        waits = takes_steps and self.has_work and self._clock() - self._last_progress > self._stall_seconds
        return self.is_silent or bool(waits)

    @property
    def is_silent(self) -> bool:
        """Whether there is a host that gives no signs of life."""
        return self._link is not None and self._link.is_silent

    @property
    def wait(self) -> Wait | None:
        """The wait that holds up the open requests: of rank 0 for other ranks, or of the gateway for rank 0."""
        if self._link is not None and (silence := self._link.silence):
            return Wait(rank=None, peers="0", step=-1, seconds=silence)
        if self._wait is None:
            return None
        wait, since = self._wait
        seconds = wait.seconds + self._clock() - since
        return msgspec.structs.replace(wait, seconds=seconds) if seconds >= TOLD_WAIT_SECONDS else None

    def register(self, task: EngineTask) -> None:
        """Take in a task that has no requests yet, so that it can be cancelled; ``forget`` it in any case."""
        self._tasks.add(task)
        if self._ending is not None:
            task.fail(self._ending)

    def open(self, request: Request, tokenizer: Tokenizer | None, streams: bool, id: str) -> RequestState:
        """The state of a request, with a key that no other has.

        Args:
            streams: whether deltas are asked for.
        """
        return RequestState(replace(request, key=f"{next(self._keys)}:{id}"), tokenizer, streams, self._clock)

    def start(self, task: EngineTask) -> None:
        """Hand the requests of a task to the host."""
        if not self.has_work:
            self._last_progress = self._clock()
        self._requests.add(task)

    def forget(self, task: EngineTask) -> None:
        """Forget a task, and let the host do so where its requests go on."""
        self._tasks.discard(task)
        self._requests.remove(task)

    def cancel(self, name: str, owner: str) -> bool:
        """End the requests with this name, if they are open and this owner's; returns whether they were."""
        matches = [task for task in self._tasks if task.owner == owner and name in task.names]
        for task in matches:
            task.fail(api_errors.cancelled())
        return bool(matches)

    def tasks(self, model: str) -> list[EngineTask]:
        """Open tasks of a model, the oldest first."""
        return sorted((task for task in self._tasks if task.model_name == model), key=lambda task: task.begin)

    def watch(self, on: bool) -> None:
        """Have the ranks tell of their steps from now on, or no longer."""
        self._tell(Watch(on))

    def tell_ready(self) -> None:
        """Tell the host that requests are taken."""
        self._tell(Ready())

    async def change_layout(self, change: LayoutChange) -> tuple[LayoutAnswer, ModelInfo]:
        """Have a model served in another layout. Returns what has become of that, and the model as it is served then.

        Args:
            change: names its model.

        Raises:
            ApiError: another change has not come to its end; or the host has died, during the change or before it, and the next one
                is not there yet.
        """
        if self._change is not None or self._awaits_outcome:
            raise _change_under_way()
        if self._link is None or self._awaits_host:
            raise api_errors.overloaded(
                "the engine has ended, and another one is awaited; try again in a moment", LOADING_SECONDS
            )
        self._change = asyncio.get_running_loop().create_future()
        try:
            self._tell(ChangeLayout(change))
            answer = await self._change
            if answer.is_busy:  # a change by --replan had begun, and the news of it was on its way here
                raise _change_under_way()
            return answer, next(model for model in self._models if model.name == change.model)
        finally:
            self._change = None

    # Frames.

    def _tell(self, frame: FromGateway) -> None:
        if self._link is not None:  # else what is open has failed, or waits for another host
            self._link.send(frame)

    def _take(self, frame: FromHost) -> None:
        self._wait = None  # who waits sends nothing but signs of life
        if isinstance(frame, Updates):
            self._last_progress = self._clock()
            for key, update in frame.answers:
                self._requests.update(key, update)
        elif isinstance(frame, Accepted):
            self._requests.accept(frame.request_id)
        elif isinstance(frame, Refused):
            self._requests.refuse(frame)
        elif isinstance(frame, Heartbeat) and self._link is not None:
            self._link.note(frame)
            self._wait = (frame.wait, self._clock()) if frame.wait else None
        elif isinstance(frame, StatsUpdate):
            num_steps = sum(stats.num_steps for stats in frame.engines)
            if num_steps != self._num_steps:  # of a long prompt, which brings no token yet
                self._num_steps, self._last_progress = num_steps, self._clock()
            for stats in frame.engines:
                self.on_stats(stats)
        elif isinstance(frame, Trace):
            self.on_trace(frame)
        elif isinstance(frame, Attach):
            self._attach(frame.models)
        elif isinstance(frame, Rebuilding):
            self.is_rebuilding = self._awaits_outcome = True
            self._requests.pause()
            self.on_end(False)
            self._tell(Paused())
        elif isinstance(frame, LayoutAnswer):
            self._awaits_outcome &= frame.is_refused
            if self._change is not None and not self._change.done():
                self._change.set_result(frame)
        elif isinstance(frame, Draining):
            self.is_draining = True

    def _attach(self, models: list[ModelInfo]) -> None:
        if self.is_rebuilding:
            self.is_rebuilding = False
            self.on_begin()
        self._end_changed(models)
        if self._awaits_host and not all(map(_can_go_on, self._models, models)):
            self._fail(api_errors.engine_failed("the engine has failed, and other models are served now"))
            self._ending = None
        self._models, self._awaits_host, self._last_progress = models, False, self._clock()
        self.on_attach(models)
        self._requests.begin()

    def _end_changed(self, models: list[ModelInfo]) -> None:
        """End open requests of models whose files have changed: another model would generate the rest of the answer."""
        for model in models:
            if not model.changed:
                continue
            tasks = self.tasks(model.name)
            error = api_errors.engine_failed(
                f"{model.changed} since the answer began, so it cannot go on; send the request again"
            )
            for task in tasks:
                task.fail(error)
            logger.warning(
                "warning: %s: the new files of model %s are served from now on; open requests that ended with an error: %d",
                model.changed,
                model.name,
                len(tasks),
            )

    def _fail(self, ending: ApiError) -> None:
        """End all that is open, and what is submitted before another host comes."""
        self._ending = ending
        for task in list(self._tasks):
            task.fail(ending)


def _change_under_way() -> ApiError:
    return api_errors.conflict("the layout is being changed already; try again when that is done")


def _can_go_on(before: ModelInfo, now: ModelInfo) -> bool:
    """Whether answers of one model can go on with the other, which may have another layout or precision, and so room for a longer or
    shorter context: what no longer fits is refused by itself."""
    return all(
        getattr(before, name) == getattr(now, name)
        for name in ("name", "tokenizer", "vocab_size", "hidden_size", "num_layers")
    )
