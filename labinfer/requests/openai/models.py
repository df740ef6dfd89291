"""OpenAI's list of models (API reference, "Models")."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from labinfer.requests.openai.api_object import ApiObject, Count


class ModelEntry(ApiObject, kw_only=True):
    """A model. The last two fields are not in OpenAI's API, and are set once the model is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "labinfer"
    max_model_len: Count | UnsetType = UNSET
    """Maximum context length, in tokens."""
    default_sampling: dict[str, float] | UnsetType = UNSET
    """Default sampling parameters of chat requests."""


class ModelList(ApiObject):
    """All models."""

    object: Literal["list"]
    data: list[ModelEntry]
