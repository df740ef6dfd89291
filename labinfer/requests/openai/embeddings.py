"""OpenAI's response to an embeddings request (API reference, "Embeddings")."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Literal

import msgspec

from labinfer.base.pooling import EmbeddingOutput
from labinfer.requests.openai.api_object import ApiObject, Count
from labinfer.requests.scoring import ClassificationOutput


class EmbeddingObject(ApiObject):
    """Embedding of one input: numbers, or base64 of little-endian float32 numbers."""

    object: Literal["embedding"]
    index: Count
    embedding: Annotated[list[float], msgspec.Meta(min_length=1)] | str


class EmbeddingUsage(ApiObject):
    """Token counts of an embeddings request, over all inputs."""

    prompt_tokens: Count
    total_tokens: Count


class EmbeddingList(ApiObject):
    """Complete response of ``/v1/embeddings``."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


def embedding_list(outputs: list[EmbeddingOutput], model: str, encoding_format: str) -> EmbeddingList:
    """Build the response of an embeddings request.

    Args:
        outputs: embeddings in the order of the inputs.
        model: value of the response's ``model`` field.
        encoding_format: "float", or "base64" of little-endian float32 numbers.
    """
    data = []
    for index, output in enumerate(outputs):
        vector: list[float] | str = output.embedding
        if encoding_format == "base64":
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
        data.append(EmbeddingObject("embedding", index, vector))
    return EmbeddingList("list", data, model, count_tokens(outputs))


def count_tokens(outputs: list[EmbeddingOutput] | list[ClassificationOutput]) -> EmbeddingUsage:
    """Token counts of a request: the sum over the prompts of ``outputs``."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return EmbeddingUsage(num_tokens, num_tokens)
