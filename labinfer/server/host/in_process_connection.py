"""InProcessConnection: connects threads of this process to an EngineHost. It replaces a gateway and its socket."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from labinfer.base.errors import UserError
from labinfer.base.pooling import EmbeddingOutput
from labinfer.engine.llm_engine import QueueFull
from labinfer.requests.outputs import Delta, RequestOutput, RequestState
from labinfer.server.link.frames import Abort, Add, FromGateway, FromHost, Heartbeat, Refused, Updates

Item = Delta | RequestOutput | EmbeddingOutput | Exception
"""One item of a request's result. An item that is not a ``Delta`` is the last one."""


@dataclass(frozen=True)
class DirectCall:
    """A request, and the callback that receives its result."""

    state: RequestState
    streams: bool
    """Whether the callback also receives deltas, before the output."""
    take: Callable[[Item], None]
    """Callback for the items of the result, called in the engine's thread. If it raises RuntimeError, because the event loop of its
    caller is closed, the request is aborted."""


class InProcessConnection:
    """Connection between an engine host and callers in the same process; replaces a ``GatewayConnection``. Only the engine host's
    thread calls ``send`` and ``receive``; the other methods are thread-safe."""

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[FromGateway] = queue.SimpleQueue()
        self._calls: dict[str, DirectCall] = {}  # by request key

    def start(self, model: str, call: DirectCall) -> None:
        """Submit a request, whose key must be unique."""
        self._calls[call.state.request.key] = call
        self._frames.put(Add(model, call.state.request))

    def abort(self, key: str) -> None:
        """Forget the request ``key``, and abort it if it has not ended yet."""
        if self._calls.pop(key, None) is not None:
            self._frames.put(Abort(key))

    def abort_all(self, error: Exception) -> None:
        """Abort every request, and pass ``error`` to the callback of each."""
        for key, call in list(self._calls.items()):
            self.abort(key)
            self._give(call, error)

    def wake(self) -> None:
        """Wake the engine host if it sleeps in ``receive``."""
        self._frames.put(Heartbeat())

    @property
    def is_empty(self) -> bool:
        """Whether the engine host has received all frames."""
        return self._frames.empty()

    def receive(self, seconds: float) -> list[FromGateway]:
        """Return the frames that have arrived; wait up to ``seconds`` for the first one."""
        frames: list[FromGateway] = []
        try:
            if seconds:
                frames.append(self._frames.get(timeout=seconds))
            while True:
                frames.append(self._frames.get_nowait())
        except queue.Empty:
            return frames

    def send(self, frame: FromHost) -> None:
        """Pass the updates of a step to the callbacks. Other frames, such as stats, are dropped."""
        if isinstance(frame, Updates):
            for key, update in frame.answers:
                if (call := self._calls.get(key)) is not None:
                    if call.state.add(update):
                        self._frames.put(Abort(key, update.index))
                    if call.streams:
                        self._give(call, call.state.take_delta(update.index))
                    if call.state.is_done:
                        self._calls.pop(key, None)
                        self._give(call, call.state.output())
        elif isinstance(frame, Refused) and (call := self._calls.pop(frame.request_id, None)) is not None:
            self._give(call, (QueueFull if frame.queue_is_full else UserError)(frame.message))

    def _give(self, call: DirectCall, item: Item) -> None:
        try:
            call.take(item)
        except RuntimeError:
            self.abort(call.state.request.key)
