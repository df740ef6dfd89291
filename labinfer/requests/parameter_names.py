"""check_registration: logits processors of plugins, whose names may be fields of requests."""

from __future__ import annotations

from typing import Any

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParameter, SamplingParams
from labinfer.requests.anthropic.message_body import MessageBody
from labinfer.requests.jsonl import SimpleLine
from labinfer.requests.openai.response_body import ResponseBody
from labinfer.requests.protocol import ChatBody, CompletionBody

BODIES = (SimpleLine, CompletionBody, ChatBody, ResponseBody, MessageBody)
"""Bodies and lines that may have the parameters of logits processors as fields."""


def check_registration(name: str, part: Any, details: dict[str, Any]) -> None:
    """Refuse a logits processor whose name means something else in requests, or whose ``parameter`` is no ``SamplingParameter``.

    Raises:
        UserError: the name or the parameter cannot be used.
    """
    taken = (
        {field for body in BODIES for field in body.__struct_fields__} if details else SamplingParams.__struct_fields__
    )
    if name in taken:
        raise UserError("requests have a field of this name; choose another one")
    if not details:
        return
    if not isinstance(details["parameter"], SamplingParameter):
        raise UserError(f"parameter must be a SamplingParameter, not {details['parameter']!r:.60}")
    if not name.isidentifier() or name != name.lower():
        raise UserError("the name of a parameter has small letters, digits and underscores, and begins with a letter")
