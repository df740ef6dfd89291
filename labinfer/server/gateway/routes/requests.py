"""``/v1/requests``: list and cancel open requests."""

from __future__ import annotations

import asyncio
from typing import Literal

from starlette.responses import Response

from labinfer.engine.request import Request
from labinfer.requests.anthropic.messages import MESSAGE_PREFIX
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_object import ApiObject, Count
from labinfer.requests.openai.chat import CHAT_PREFIX
from labinfer.requests.openai.completions import COMPLETION_PREFIX
from labinfer.requests.openai.responses import RESPONSE_PREFIX
from labinfer.server.gateway.admission_control import MAX_USER_LENGTH
from labinfer.server.gateway.endpoint import MODEL_ERRORS, STORED_ERRORS, STRING, endpoint
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.open_requests import EngineTask
from labinfer.server.link.frames import ModelInfo

PREFIXES = (CHAT_PREFIX, COMPLETION_PREFIX, RESPONSE_PREFIX, MESSAGE_PREFIX)
MAX_LISTED = 200
"""Maximum number of listed requests; of more, the oldest are listed."""


class ListedRequest(ApiObject, kw_only=True):
    """An open request: its age in seconds and its progress, without text."""

    id: str
    object: Literal["request"] = "request"
    model: str
    own: bool
    """Whether the request belongs to the caller, who may then cancel it."""
    caller: str
    """Name of the API key that sent the request; "anonymous" on a server without keys."""
    user: str | None
    """Field ``user`` of the request's body; null if the body has none, and for requests of other API keys."""
    state: Literal["running", "waiting"]
    """Whether the request had a sequence in the batches when the engine last sent stats. If not, the request waits for admission,
    for tokenization, or for a place in a batch."""
    age: float
    prompt_tokens: Count
    """Number of prompt tokens; 0 until the prompt is tokenized."""
    cached_tokens: Count
    """Number of prompt tokens that were prefix-cache hits."""
    generated_tokens: Count
    max_tokens: Count
    """Maximum number of output tokens of all answers of the request together."""


class RequestList(ApiObject, kw_only=True):
    """Open requests of a model, oldest first."""

    object: Literal["list"] = "list"
    data: list[ListedRequest]
    total: Count
    """Number of open requests, including requests that are not listed."""
    running: Count
    """Number of open requests with a sequence in the batches; all other open requests wait."""


class Cancelled(ApiObject, kw_only=True):
    """A cancelled request, with the id from the path."""

    id: str
    object: Literal["request.cancelled"] = "request.cancelled"
    cancelled: Literal[True] = True


@endpoint("POST", "/v1/requests/{id}/cancel", answer=Cancelled, errors=STORED_ERRORS)
async def cancel(context: HttpContext) -> Response:
    """Cancel an open request of this caller, by the id of its answer or of the header x-request-id.

    Its KV blocks are freed at once. The id may be given with or without the prefix of the answer.
    """
    given = context.http.path_params["id"]
    ids = (given, *(given.removeprefix(prefix) for prefix in PREFIXES))
    if not any(context.service.engine.cancel(id, context.caller.name) for id in ids):
        raise api_errors.not_found_request(given)
    return context.json(Cancelled(id=given))


@endpoint("GET", "/v1/requests", logged=False, answer=RequestList, query=(("model", STRING),), errors=MODEL_ERRORS)
async def list_open(context: HttpContext) -> Response:
    """List open requests to a model, with their ages and progress.

    Requests of all callers are listed, as are their steps under ``/v1/cluster``.
    """
    model = context.service.loaded_model(context.query().get("model")).info
    engine, now = context.service.engine, asyncio.get_running_loop().time()
    tasks, running = engine.tasks(model.name), engine.running_tasks(model.name)
    listed = [_describe(task, context.caller.name, task in running, now, model) for task in tasks[:MAX_LISTED]]
    return context.json(RequestList(data=listed, total=len(tasks), running=len(running)))


def _describe(task: EngineTask, caller: str, is_running: bool, now: float, model: ModelInfo) -> ListedRequest:
    own = task.owner == caller
    return ListedRequest(
        id=task.id,
        model=task.model_name,
        own=own,
        caller=task.owner,
        user=task.user[:MAX_USER_LENGTH] or None if own else None,
        state="running" if is_running else "waiting",
        age=now - task.begin,
        prompt_tokens=sum(len(state.prompt_token_ids) for state in task.opened),
        cached_tokens=sum(state.num_cached_tokens for state in task.opened),
        generated_tokens=sum(state.num_output_tokens for state in task.opened),
        max_tokens=sum(_max_tokens(state.request, model) for state in task.opened),
    )


def _max_tokens(request: Request, model: ModelInfo) -> int:
    """Maximum number of output tokens of all answers of a request together, within the context length."""
    if request.pooling:
        return 0
    most = request.sampling.max_tokens
    if not model.context_shift:
        most = min(most, max(0, model.max_model_len - len(request.prompt_token_ids)))
    return most * max(request.sampling.num_choices, request.sampling.num_beams)
