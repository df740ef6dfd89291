"""AsyncLLMEngine: the gateway's client of the engines on the engine host, over a local socket."""

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

MIN_REPORTED_WAIT_SECONDS = 5.0
"""Minimum duration, in seconds, of a wait that the property ``wait`` reports. Shorter waits are normal with a long prompt."""
ENGINE_HAS_FAILED = "the engine has failed and the server is shutting down; try again later"


class AsyncLLMEngine:
    """Client of the engines on the attached engine host (rank 0's process); serves any number of concurrent requests.

    Args:
        clock: monotonic time in seconds.
        outlives_host: whether open requests are kept for the next host when a host dies; otherwise they fail.
        stall_seconds: seconds without a completed step, while requests are open, after which the engine counts as
            stalled.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        outlives_host: bool = False,
        stall_seconds: float = DEFAULT_TIMEOUT,
    ):
        self._clock, self._outlives_host, self._stall_seconds = clock, outlives_host, stall_seconds
        self._num_steps = 0  # completed steps, over all engines
        self._last_progress = clock()  # time of the last completed step, or when an idle engine got work
        self._wait: tuple[Wait, float] | None = None  # rank 0's wait from the last heartbeat, and its arrival time
        self._link: HostConnection | None = None
        self._tasks: set[EngineTask] = set()  # open tasks, which can be cancelled
        self._requests = OpenRequests(self._tell)
        self._models: list[ModelInfo] = []  # models of the last host that became ready
        self._running_keys: dict[str, list[str]] = {}  # keys of running requests by model, from the last stats
        self._keys = itertools.count()  # prefix that makes keys unique, as two callers may choose one id
        self._ending: ApiError | None = None  # error that ended all open tasks, until the next host attaches
        self.is_draining = False
        """Whether the engine host is shutting down: it finishes running requests and accepts no others."""
        self._awaits_host = False  # the host died, and open requests wait for the next host
        self.is_rebuilding = False
        """Whether the models are being reloaded in another layout; open requests wait meanwhile."""
        self._change: asyncio.Future[LayoutAnswer] | None = None  # result of the pending ``change_layout``
        self._awaits_outcome = False  # a layout change has begun and its ``LayoutAnswer`` has not arrived
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None
        """Called with each ``EngineStats`` that arrives from the engine host."""
        self.on_trace: Callable[[Trace], None] = lambda trace: None
        """Called with each ``Trace`` of steps that arrives; the engine host sends traces between ``watch(True)`` and ``watch(False)``."""
        self.on_attach: Callable[[list[ModelInfo]], None] = lambda models: None
        """Called with the models of an engine host when it has loaded them."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when an engine host has connected, and when it has reloaded models."""
        self.on_end: Callable[[bool], None] = lambda is_final: None
        """Called when the engine host sends no more data. The argument says whether open requests have failed because no other
        host will continue them."""

    async def run(self, link: HostConnection) -> None:
        """Exchange frames with an engine host until it sends ``Shutdown``.

        Raises:
            BrokenConnection: the host has ended without ``Shutdown``.
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
                self._change.set_exception(api_errors.engine_failed("the engine exited during the layout change"))
            self._awaits_host = ending is None and bool(self._models)
            if ending is not None:
                self._fail(ending)
            self.on_end(not self._awaits_host)

    @property
    def is_recovering(self) -> bool:
        """Whether an engine host has died, and some of its open requests have not resumed on the next one."""
        return self._awaits_host or self._requests.runs_suspect

    @property
    def has_work(self) -> bool:
        """Whether requests are open."""
        return self._requests.any_open

    @property
    def is_stalled(self) -> bool:
        """Whether the engine host sends no heartbeats, or completes no steps although requests are open."""
        takes_steps = self._link is not None and self._models and not (self._awaits_host or self.is_rebuilding)
        waits = takes_steps and self.has_work and self._clock() - self._last_progress > self._stall_seconds
        return self.is_silent or bool(waits)

    @property
    def is_silent(self) -> bool:
        """Whether the heartbeats of the attached engine host are overdue."""
        return self._link is not None and self._link.is_silent

    @property
    def wait(self) -> Wait | None:
        """The wait that blocks the open requests: rank 0 waits for other ranks, or the gateway waits for rank 0. None if nothing
        blocks the requests."""
        if self._link is not None and (silence := self._link.silence):
            return Wait(rank=None, peers="0", step=-1, seconds=silence)
        if self._wait is None:
            return None
        wait, since = self._wait
        seconds = wait.seconds + self._clock() - since
        return msgspec.structs.replace(wait, seconds=seconds) if seconds >= MIN_REPORTED_WAIT_SECONDS else None

    def register(self, task: EngineTask) -> None:
        """Register a task before it has requests, so that it can be cancelled. The caller must call ``forget`` in the end."""
        self._tasks.add(task)
        if self._ending is not None:
            task.fail(self._ending)

    def open(self, request: Request, tokenizer: Tokenizer | None, streams: bool, id: str) -> RequestState:
        """Make the ``RequestState`` of a request, with a unique key for the engine.

        Args:
            streams: whether deltas are needed, for a streamed response.
        """
        return RequestState(replace(request, key=f"{next(self._keys)}:{id}"), tokenizer, streams, self._clock)

    def start(self, task: EngineTask) -> None:
        """Submit the requests of ``task`` to the engine host."""
        if not self.has_work:
            self._last_progress = self._clock()
        self._requests.add(task)

    def forget(self, task: EngineTask) -> None:
        """Remove ``task``, and abort its unfinished requests on the engine host."""
        self._tasks.discard(task)
        self._requests.remove(task)

    def cancel(self, name: str, owner: str) -> bool:
        """Cancel the open tasks of ``owner`` that have the id ``name`` (see ``GenerationTask.names``). Returns whether there were
        such tasks."""
        matches = [task for task in self._tasks if task.owner == owner and name in task.names]
        for task in matches:
            task.fail(api_errors.cancelled())
        return bool(matches)

    def tasks(self, model: str) -> list[EngineTask]:
        """Tasks of ``model`` with unfinished answers, oldest first."""
        unfinished = (task for task in self._tasks if task.model_name == model and not _is_done(task))
        return sorted(unfinished, key=lambda task: task.begin)

    def running_tasks(self, model: str) -> set[EngineTask]:
        """Tasks of ``model`` that had a running sequence when the engine last sent statistics."""
        running = self._requests.owners(self._running_keys.get(model, ()))
        return {task for task in running if not _is_done(task)}

    def watch(self, on: bool) -> None:
        """Make the ranks start (``on``) or stop recording step traces."""
        self._tell(Watch(on))

    def notify_ready(self) -> None:
        """Notify the engine host that the gateway accepts requests."""
        self._tell(Ready())

    async def change_layout(self, change: LayoutChange) -> tuple[LayoutAnswer, ModelInfo]:
        """Reload a model in another layout. Returns the outcome, and the model as it is served afterwards.

        Args:
            change: the new layout, and the name of the model.

        Raises:
            ApiError: another change is pending; or the engine host died before or during the change, and its successor
                is not attached yet.
        """
        if self._change is not None or self._awaits_outcome:
            raise _change_under_way()
        if self._link is None or self._awaits_host:
            raise api_errors.overloaded(
                "the engine has exited and is being restarted; try again in a moment", LOADING_SECONDS
            )
        self._change = asyncio.get_running_loop().create_future()
        try:
            self._tell(ChangeLayout(change))
            answer = await self._change
            if answer.is_busy:  # before the host received this change, a change by --replan had begun
                raise _change_under_way()
            return answer, next(model for model in self._models if model.name == change.model)
        finally:
            self._change = None

    # Frames to and from the engine host.

    def _tell(self, frame: FromGateway) -> None:
        if self._link is not None:  # without a host, open requests have failed or wait for the next host
            self._link.send(frame)

    def _take(self, frame: FromHost) -> None:
        self._wait = None  # any other frame shows that rank 0 has stopped waiting
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
            if num_steps != self._num_steps:  # counts as progress even without tokens, as of a long prompt
                self._num_steps, self._last_progress = num_steps, self._clock()
            for stats in frame.engines:
                self._running_keys[stats.model] = stats.running_keys
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
            self._fail(api_errors.engine_failed("the engine has failed, and the restarted one serves other models"))
            self._ending = None
        self._models, self._awaits_host, self._last_progress = models, False, self._clock()
        self.on_attach(models)
        self._requests.begin()

    def _end_changed(self, models: list[ModelInfo]) -> None:
        """Fail the open requests of models whose files have changed, as a different model would continue their answers."""
        for model in models:
            if not model.changed:
                continue
            tasks = self.tasks(model.name)
            error = api_errors.engine_failed(
                f"{model.changed} since the output began, so it cannot be continued; send the request again"
            )
            for task in tasks:
                task.fail(error)
            logger.warning(
                "warning: %s: model %s now serves the new files; open requests that ended with an error: %d",
                model.changed,
                model.name,
                len(tasks),
            )

    def _fail(self, ending: ApiError) -> None:
        """Fail all open tasks with ``ending``, and also every task that is registered before the next engine host attaches."""
        self._ending = ending
        for task in list(self._tasks):
            task.fail(ending)


def _is_done(task: EngineTask) -> bool:
    """Whether all answers of a task are finished; its client may still be reading them."""
    return bool(task.opened) and all(state.is_done for state in task.opened)


def _change_under_way() -> ApiError:
    return api_errors.conflict("a layout change is already in progress; try again when it is done")


def _can_go_on(before: ModelInfo, now: ModelInfo) -> bool:
    """Whether the restarted model ``now`` can continue answers of ``before``. Layout, precision and maximum context length may
    differ: the engine host refuses requests that do not fit any more."""
    return all(
        getattr(before, name) == getattr(now, name)
        for name in ("name", "tokenizer", "vocab_size", "hidden_size", "num_layers")
    )
