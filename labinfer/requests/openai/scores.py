"""vLLM's responses to pooling, score, rerank and classify requests (vLLM's documentation, "OpenAI-Compatible Server")."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from labinfer.base.pooling import EmbeddingOutput
from labinfer.requests.openai.api_object import ApiObject, Count
from labinfer.requests.openai.embeddings import EmbeddingUsage, count_tokens, embedding_list
from labinfer.requests.scoring import ClassificationOutput


class Pooled(ApiObject):
    """Pooled output of one input (an embedding, or the scores of all labels): numbers, or base64 of little-endian float32 numbers."""

    object: Literal["pooling"]
    index: Count
    data: Annotated[list[float], msgspec.Meta(min_length=1)] | str


class PooledList(ApiObject, kw_only=True):
    """Complete response of ``/pooling``."""

    id: str
    object: Literal["list"] = "list"
    created: Count
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage


class Score(ApiObject):
    """Score of one pair of texts: a relevance by the model's score head, or a cosine similarity from -1 to 1."""

    object: Literal["score"]
    index: Count
    score: float


class ScoreList(ApiObject, kw_only=True):
    """Complete response of ``/score``."""

    id: str
    object: Literal["list"] = "list"
    created: Count
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class ClassifiedInput(ApiObject, kw_only=True):
    """Classes of one input."""

    index: Count
    label: str
    """Name of the label with the largest score."""
    probs: list[float]
    """Score of each label, in the order of the model's labels."""
    num_classes: Count


class ClassificationList(ApiObject, kw_only=True):
    """Complete response of ``/classify``."""

    id: str
    object: Literal["list"] = "list"
    created: Count
    model: str
    data: list[ClassifiedInput]
    usage: EmbeddingUsage


class DocumentText(ApiObject):
    """Text of a document in a response of ``/rerank``."""

    text: str


class RankedDocument(ApiObject):
    """Index of a document in its request, and its score with the query; see ``Score``."""

    index: Count
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class Ranking(ApiObject, kw_only=True):
    """Complete response of ``/rerank``, the document with the largest score first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


def pooled_list(outputs: list[EmbeddingOutput], encoding_format: str, **fields: str | int) -> PooledList:
    """Build the response of ``/pooling``; see ``embedding_list``. ``fields`` are id, creation time and model of the response."""
    whole = embedding_list(outputs, "", encoding_format)
    data = [Pooled("pooling", item.index, item.embedding) for item in whole.data]
    return PooledList(data=data, usage=whole.usage, **fields)


def classification_list(outputs: list[ClassificationOutput], **fields: Any) -> ClassificationList:
    """Build the response of ``/classify``. ``fields`` are id, creation time and model of the response."""
    data = [
        ClassifiedInput(index=index, label=output.label, probs=output.probs, num_classes=len(output.probs))
        for index, output in enumerate(outputs)
    ]
    return ClassificationList(data=data, usage=count_tokens(outputs), **fields)
