"""OpenRequests: the requests that are open on the engine host, and their transfer to the next engine host when this one dies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from labinfer.base.errors import PromptTooLong, UserError
from labinfer.base.sampling_params import MAX_SEED
from labinfer.engine.request import AnswerUpdate, Request
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ApiError
from labinfer.requests.outputs import RequestState
from labinfer.server.gateway.admission_control import RETRY_SECONDS
from labinfer.server.gateway.refusals import refused_field
from labinfer.server.link.frames import Abort, Add, FromGateway, Refused

MAX_DEATHS = 2
"""Number of engine hosts that may die while they run one request alone; then the request is aborted."""
ALONE_TOKENS = (1, 16, 64)
"""Number of tokens that a suspect must generate alone on a new engine host before other requests run: the first number after one
death of a host, the second after two, the third after more."""
FORGIVEN_TOKENS = 256
"""Number of tokens that a request must generate on an engine host after which earlier deaths of hosts are forgotten."""


class EngineTask(Protocol):
    """Interface of ``GenerationTask``, requests that are submitted together, for the client of the engine."""

    id: str
    owner: str
    user: str
    model_name: str
    names: set[str]
    begin: float
    opened: list[RequestState]

    def accept(self) -> None: ...

    def update(self, number: int, update: AnswerUpdate) -> bool: ...

    def fail(self, error: ApiError) -> None: ...


@dataclass(eq=False, kw_only=True)
class OpenRequest:
    """An unfinished request of a task."""

    task: EngineTask
    number: int
    """Index of the request in its task."""
    is_accepted: bool = False
    """Whether an engine host has accepted the request at any time."""
    deaths: int = 0
    """Number of engine hosts in a row that died while the request was running."""
    has_run_alone: bool = False
    """Whether the request, a suspect, has been submitted alone to the current engine host."""
    was_reached: bool = False
    """Whether the current engine host has sent any frame about the request."""
    tokens_before: int = 0
    """Number of output tokens that the request had when it was submitted to the current engine host."""
    keys: list[str] = field(default_factory=list)
    """Keys of the request on the current engine host: one key, or one per unfinished answer."""

    @property
    def state(self) -> RequestState:
        return self.task.opened[self.number]

    @property
    def new_tokens(self) -> int:
        """Number of output tokens from the current engine host."""
        return self.state.num_output_tokens - self.tokens_before


class OpenRequests:
    """Open requests of all tasks, in submission order.

    When an engine host dies, its requests stay open, and continue on the next host with the tokens that they have. One of the
    requests that were running may have killed the host. These suspects first run one at a time, each alone, for a few tokens; then
    all other requests are submitted.

    Args:
        send: sends a frame to the engine host.
    """

    def __init__(self, send: Callable[[FromGateway], None]):
        self._send = send
        self._requests: dict[str, OpenRequest] = {}  # by request key
        self._parts: dict[str, tuple[OpenRequest, int | None]] = {}
        """Maps each key on the engine host to (request, index of the answer); the index is None if the key stands for
        the whole request."""
        self._attempts = itertools.count()
        self._takes_all = False  # whether new requests are sent to the host at once; not while suspects run alone
        self._suspect: OpenRequest | None = None
        self._last_suspect: OpenRequest | None = None
        """Suspect that ran alone before ``_suspect``. It may still have killed the engine host, just after the last token that it
        had to generate alone."""

    @property
    def any_open(self) -> bool:
        """Whether any request is open."""
        return bool(self._requests)

    @property
    def runs_suspect(self) -> bool:
        """Whether a suspect is running alone, while all other requests wait."""
        return self._suspect is not None

    def owners(self, keys: Iterable[str]) -> set[EngineTask]:
        """Tasks of the requests whose keys on the engine host are among ``keys``."""
        return {part[0].task for key in keys if (part := self._parts.get(key)) is not None}

    def add(self, task: EngineTask) -> None:
        """Add the requests of a task. They are submitted at once, or once all suspects have run alone."""
        for number, state in enumerate(task.opened):
            request = self._requests[state.request.key] = OpenRequest(task=task, number=number)
            if self._takes_all:
                self._hand_over(request)

    def remove(self, task: EngineTask) -> None:
        """Remove a task's requests, and abort the unfinished ones on the engine host."""
        keys = [state.request.key for state in task.opened if state.request.key in self._requests]
        requests = [self._requests.pop(key) for key in keys]
        for request in requests:
            self._take_back(request)
        if self._suspect in requests:
            self._run_next_suspect()

    def begin(self) -> None:
        """Submit all open requests to an engine host that has just become ready."""
        self._run_next_suspect()

    def pause(self) -> None:
        """Keep all requests open until the next ``begin``: the engine host has dropped them, as it reloads models."""
        if self._suspect is not None:
            self._suspect.has_run_alone = False
        for request in self._requests.values():
            request.was_reached = False
            request.keys.clear()
        self._parts.clear()
        self._takes_all, self._suspect, self._last_suspect = False, None, None

    def end(self, max_running: int) -> None:
        """Keep all requests open after the death of the engine host, and mark those that were running as suspects.

        Args:
            max_running: maximum batch size of the host: the oldest requests without a token, up to this number, may have been running too.
        """
        handed = [request for request in self._requests.values() if request.keys and not request.state.is_done]
        begun = [request for request in handed if request.new_tokens]
        waiting = [request for request in handed if not request.new_tokens]
        suspect, doubted = self._suspect, None
        if suspect is not None and not suspect.was_reached:
            doubted = self._last_suspect
        running = (
            [request for request in (suspect, doubted) if request] if suspect else [*begun, *waiting[:max_running]]
        )
        for request in running:
            request.deaths = 1 if request.new_tokens >= FORGIVEN_TOKENS else request.deaths + 1
        for request in self._requests.values():
            request.has_run_alone = False
        self.pause()
        if suspect is not None and suspect.deaths >= MAX_DEATHS + (doubted is not None):
            message = f"the engine died {suspect.deaths} times while it ran this request, so the request is aborted"
            suspect.task.fail(api_errors.given_up(message))

    # Handlers of the host's frames.

    def accept(self, key: str) -> None:
        """Handle the frame ``Accepted`` of the engine host, for the request or answer ``key``."""
        request, _ = self._parts.get(key, (None, None))
        if request is None:
            return
        request.was_reached = True
        if not request.is_accepted:
            request.is_accepted = True
            request.task.accept()

    def refuse(self, frame: Refused) -> None:
        """Handle the frame ``Refused`` of the engine host: fail the task of the request."""
        request, _ = self._parts.pop(frame.request_id, (None, None))
        if request is not None:
            request.keys.remove(frame.request_id)
            if frame.queue_is_full:
                error = api_errors.overloaded(frame.message, RETRY_SECONDS)
            else:
                error = refused_field((PromptTooLong if frame.is_too_long else UserError)(frame.message))
            request.task.fail(error)

    def update(self, key: str, update: AnswerUpdate) -> None:
        """Pass the engine host's update of the answer ``key`` to its task. If a suspect has now run alone for long enough, submit
        the next suspect."""
        request, index = self._parts.get(key, (None, None))
        if request is None:
            return
        own = update if index is None else msgspec.structs.replace(update, index=index)
        if request.task.update(request.number, own):
            self._send(Abort(key, update.index))
        if request is self._suspect and self._is_cleared(request):
            self._take_back(request)
            self._run_next_suspect()

    # Submission to the engine host.

    def _is_cleared(self, request: OpenRequest) -> bool:
        least = ALONE_TOKENS[min(request.deaths, len(ALONE_TOKENS)) - 1]
        return request.state.is_done or request.new_tokens >= least

    def _run_next_suspect(self) -> None:
        """Submit the next suspect alone. If none is left, submit all other requests."""
        self._last_suspect, self._suspect = self._suspect, None
        for request in list(self._requests.values()):
            if request.deaths and not request.has_run_alone and not request.state.is_done:
                request.has_run_alone, self._suspect = True, request
                self._hand_over(request)
                return
        self._takes_all = True
        for request in self._requests.values():
            if not request.keys and not request.state.is_done:
                self._hand_over(request)

    def _hand_over(self, request: OpenRequest) -> None:
        request.tokens_before = request.state.num_output_tokens
        for index, part in remaining_parts(request.state):
            key = f"{next(self._attempts)}:{part.key.partition(':')[2]}"  # a number, and the id of the HTTP request
            request.keys.append(key)
            self._parts[key] = (request, index)
            self._send(Add(request.task.model_name, replace(part, key=key), request.is_accepted))

    def _take_back(self, request: OpenRequest) -> None:
        for key in request.keys:
            self._parts.pop(key)
            if not request.state.is_done:
                self._send(Abort(key))
        request.keys.clear()


def remaining_parts(state: RequestState) -> Iterator[tuple[int | None, Request]]:
    """Yield engine requests that continue the unfinished answers of a request, each as (index of the answer, engine
    request). A request without tokens yields only (None, the request itself).

    The engine requests together generate the tokens that the request itself would have generated.
    """
    request, sampling = state.request, state.request.sampling
    if not any(answer.token_ids for answer in state.answers):
        yield None, request
        return
    ranks = sampling.num_choices > sampling.n  # best_of and beam search compare answers by logprobs
    for answer in state.answers:
        if answer.finish_reason is not None:
            continue
        wants_prompt = answer.index == 0 and state.prompt_logprobs is None
        own = msgspec.structs.replace(
            sampling,
            n=1,
            best_of=0,
            seed=(sampling.seed + answer.index) % (MAX_SEED + 1),
            logprobs=0 if ranks and sampling.logprobs is None else sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs if wants_prompt else None,
        )
        yield answer.index, replace(request, sampling=own, output_token_ids=tuple(answer.token_ids))
