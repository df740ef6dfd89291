"""vLLM's responses to pooling, score and rerank requests (vLLM's documentation, "OpenAI-Compatible Server")."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from labinfer.base.pooling import EmbeddingOutput
from labinfer.requests.openai.api_object import ApiObject, Count
from labinfer.requests.openai.embeddings import EmbeddingUsage, embedding_list


class Pooled(ApiObject):
    """Pooled embedding of one input: numbers, or base64 of little-endian float32 numbers."""

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
    """Cosine similarity of one pair of texts, from -1 to 1."""

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


class DocumentText(ApiObject):
    """Text of a document in a response of ``/rerank``."""

    text: str


class RankedDocument(ApiObject):
    """Index of a document in its request, and its cosine similarity to the query, from -1 to 1."""

    index: Count
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class Ranking(ApiObject, kw_only=True):
    """Complete response of ``/rerank``, the most similar document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


def pooled_list(outputs: list[EmbeddingOutput], encoding_format: str, **fields: str | int) -> PooledList:
    """Build the response of ``/pooling``; see ``embedding_list``. ``fields`` are id, creation time and model of the response."""
    whole = embedding_list(outputs, "", encoding_format)
    data = [Pooled("pooling", item.index, item.embedding) for item in whole.data]
    return PooledList(data=data, usage=whole.usage, **fields)


def cosine_scores(first: list[EmbeddingOutput], second: list[EmbeddingOutput]) -> list[float]:
    """Cosine similarities of pairs of embeddings. If ``first`` has one embedding, it is paired with every embedding in
    ``second``."""
    if len(first) == 1:
        first = first * len(second)
    pairs = zip(first, second, strict=True)
    return [
        sum(a * b for a, b in zip(left.normalized().embedding, right.normalized().embedding, strict=True))
        for left, right in pairs
    ]
