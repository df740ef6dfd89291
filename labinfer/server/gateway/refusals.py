"""checked and refused_field: convert a ``UserError`` to the ``ApiError`` of an invalid request, with the name of the invalid
field."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from labinfer.base.errors import PromptTooLong, UserError
from labinfer.base.sampling_params import sampling_parameters
from labinfer.requests.anthropic.message_body import MessageBody
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.files import BatchBody
from labinfer.requests.openai.response_body import ResponseBody
from labinfer.requests.protocol import ChatBody, CompletionBody, EmbeddingBody
from labinfer.requests.score_bodies import ClassifyBody, RerankBody, ScoreBody
from labinfer.server.link.layout_change import LayoutChange

BODIES = (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    ScoreBody,
    ClassifyBody,
    RerankBody,
    ResponseBody,
    MessageBody,
    BatchBody,
    LayoutChange,
)
FIELD_NAMES = {name for body in BODIES for name in body.__struct_fields__} | {"tokens", "text_1", "limit", "order"}
"""Names of request fields that an error text may begin with: fields of all bodies, of ``/detokenize`` and ``/score``,
and parameters of lists."""

Result = TypeVar("Result")


def checked(make: Callable[[], Result]) -> Result:
    """Return the result of ``make``; convert a ``UserError`` to the ``ApiError`` of an invalid request."""
    try:
        return make()
    except UserError as error:
        raise refused_field(error) from None


def refused_field(error: UserError) -> api_errors.ApiError:
    """Convert a ``UserError`` to an ``ApiError``. If the text begins with the name of a field, that field is the error's ``param``."""
    text = str(error)
    if isinstance(error, PromptTooLong):
        return api_errors.too_long(text)
    first = re.split(r"[\s.:=\[]", text, maxsplit=1)[0]
    return api_errors.bad_request(text, first if first in FIELD_NAMES or first in sampling_parameters() else None)
