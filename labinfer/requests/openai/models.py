"""OpenAI's list of models (API reference, "Models")."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from labinfer.requests.openai.api_object import ApiObject, Count


class ModelStage(ApiObject):
    """A pipeline stage of a model: number of tensor-parallel ranks, and dtype and quantization of the weights ("none"
    if they are not quantized)."""

    tensor_parallel_size: Count
    dtype: str
    quantization: str


class ModelEntry(ApiObject, kw_only=True):
    """A model. The fields after ``owned_by`` are not in OpenAI's API, and are set once the model is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "labinfer"
    max_model_len: Count | UnsetType = UNSET
    """Maximum context length, in tokens."""
    default_sampling: dict[str, float] | UnsetType = UNSET
    """Sampling parameters of chat requests that do not set them."""
    num_parameters: Count | UnsetType = UNSET
    """Number of parameters (weights) of the model; quantization does not change it."""
    stages: list[ModelStage] | UnsetType = UNSET
    """Pipeline stages of the model."""
    fingerprint: str | UnsetType = UNSET
    """Digest of all that the answers depend on; responses have it as ``system_fingerprint``."""
    reproducible: bool | UnsetType = UNSET
    """Whether models with equal ``fingerprint`` give bit-identical answers on every layout and in every batch
    (``--reproducible``)."""


class ModelList(ApiObject):
    """All served models."""

    object: Literal["list"]
    data: list[ModelEntry]
