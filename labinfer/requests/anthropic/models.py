"""Anthropic's list of models (API reference, "Models")."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Literal

from labinfer.requests.openai.api_object import ApiObject, Count
from labinfer.requests.openai.models import ModelEntry


class AnthropicModel(ApiObject, kw_only=True, tag_field="type", tag="model"):
    """A served model, in the format of Anthropic's API."""

    id: str
    display_name: str
    created_at: str
    """Time at which the model was created; RFC 3339."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: Count | None = None
    max_tokens: Count | None = None
    """Maximum tokens of a prompt (``max_input_tokens``) and of an answer (``max_tokens``); null until the model is loaded."""


class AnthropicModelList(ApiObject, kw_only=True):
    """A page of models."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def anthropic_model(entry: ModelEntry) -> AnthropicModel:
    """Convert an entry of OpenAI's list to Anthropic's format."""
    created_at = datetime.fromtimestamp(entry.created, timezone.utc).isoformat().replace("+00:00", "Z")
    length = entry.max_model_len if isinstance(entry.max_model_len, int) else None
    return AnthropicModel(
        id=entry.id, display_name=entry.id, created_at=created_at, max_input_tokens=length, max_tokens=length
    )


def anthropic_model_list(
    models: list[AnthropicModel], limit: int, after_id: str | None, before_id: str | None
) -> AnthropicModelList:
    """Select a page of ``limit`` models: those after the model ``after_id``, those directly before the model ``before_id``, or the
    first ones if both are None.

    An unknown id is ignored.
    """
    ids = [model.id for model in models]
    begin, end = ids.index(after_id) + 1 if after_id in ids else 0, len(models)
    if before_id in ids:
        end = ids.index(before_id)
        begin = max(begin, end - limit)
        has_more = begin > 0
    else:
        has_more = begin + limit < end
    data = models[begin : min(end, begin + limit)]
    return AnthropicModelList(
        data=data,
        has_more=has_more,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )
