"""``/v1/requests``: open requests, by their ids."""

from __future__ import annotations

from typing import Literal

from starlette.responses import Response

from labinfer.anthropic.messages import MESSAGE_PREFIX
from labinfer.gateway.call import Call
from labinfer.openai import api_errors
from labinfer.openai.answer import Answer
from labinfer.openai.chat import CHAT_PREFIX
from labinfer.openai.completions import COMPLETION_PREFIX
from labinfer.openai.responses import RESPONSE_PREFIX

PREFIXES = (CHAT_PREFIX, COMPLETION_PREFIX, RESPONSE_PREFIX, MESSAGE_PREFIX)


class Cancelled(Answer, kw_only=True):
    """A request that is cancelled, by the id that was asked for."""

    id: str
    object: Literal["request.cancelled"] = "request.cancelled"
    cancelled: Literal[True] = True


async def cancel(call: Call) -> Response:
    """``POST /v1/requests/{id}/cancel``: end an open request of the same caller; its KV blocks are free at once.

    The id is that of the response, with or without its prefix, and that of the header ``x-request-id``.
    """
    given = call.http.path_params["id"]
    ids = (given, *(given.removeprefix(prefix) for prefix in PREFIXES))
    if not any(call.service.engine.cancel(id, call.caller.name) for id in ids):
        raise api_errors.not_found_request(given)
    return call.json(Cancelled(id=given))
