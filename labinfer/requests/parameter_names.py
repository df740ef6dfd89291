"""check_registration: checks the names of plugins' logits processors, which become names of request fields."""

from __future__ import annotations

from typing import Any

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParameter, SamplingParams
from labinfer.requests.anthropic.message_body import MessageBody
from labinfer.requests.jsonl import SimpleLine
from labinfer.requests.openai.response_body import ResponseBody
from labinfer.requests.protocol import ChatBody, CompletionBody

BODIES = (SimpleLine, CompletionBody, ChatBody, ResponseBody, MessageBody)
"""Schemas of HTTP bodies and JSONL lines in which parameters of plugins' logits processors are fields."""


def check_registration(name: str, part: Any, details: dict[str, Any]) -> None:
    """Refuse a logits processor whose name is a request field already, or whose ``parameter`` is not a ``SamplingParameter``.

    Raises:
        UserError: the name or the parameter is unusable.
    """
    taken = (
        {field for body in BODIES for field in body.__struct_fields__} if details else SamplingParams.__struct_fields__
    )
    if name in taken:
        raise UserError("requests already have a field with this name; choose another one")
    if not details:
        return
    if not isinstance(details["parameter"], SamplingParameter):
        raise UserError(f"parameter must be a SamplingParameter, not {details['parameter']!r:.60}")
    if not name.isidentifier() or name != name.lower():
        raise UserError(
            "a parameter name must consist of lower-case letters, digits and underscores, and begin with a letter"
        )
