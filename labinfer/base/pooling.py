"""PoolingConfig: how a model's hidden states are pooled; EmbeddingOutput: the pooled vector of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.plan import POOLINGS


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Default pooling of a checkpoint, for embedding requests that name none."""

    pooling: str = "last"
    """Pooling of requests that name none, one of ``plan.POOLINGS``."""
    normalize: bool = True
    """Whether vectors are scaled to Euclidean length 1."""
    is_embedder: bool = False
    """Whether the checkpoint is an embedding model. Cosines of other models' hidden states are meaningless."""
    refusal: str = ""
    """Reason why the checkpoint's own pooling is not supported; empty if it is supported."""

    instead: str = ""
    """Routes of a classifier or reranker, which gives no embeddings; empty for other models."""

    default_prompt: str = ""
    """Name of the prompt that sentence-transformers prepends to every text by default; LABInfer prepends it if a request names it."""

    matryoshka_dimensions: tuple[int, ...] = ()
    """Lengths to which vectors may be cut (``matryoshka_dimensions`` of ``config.json``); empty for any length."""

    prompts: dict[str, str] = {}
    """Texts that a request can put before its inputs, by name (``config_sentence_transformers.json``)."""

    @property
    def warning(self) -> str:
        """Warning about the pooling, for the startup log; empty for none."""
        if self.refusal:
            return f"embeddings: {self.refusal}"
        if self.default_prompt:
            return (
                f"embeddings: sentence-transformers puts the prompt {self.default_prompt!r} before every text "
                "(default_prompt_name); here, texts are embedded without a prompt unless a request has prompt_name"
            )
        return ""

    def resolve(self, pooling: str | None) -> str:
        """Choose the pooling of a request.

        Args:
            pooling: pooling of the request; None for the model's default.

        Raises:
            UserError: the pooling is unknown, or the request names none and the model's default cannot be computed.
        """
        if self.instead:
            raise UserError(f"this model gives no embeddings: it has a head for scores; use {self.instead}")
        if pooling is None:
            if self.refusal:
                raise UserError(f"pooling: {self.refusal}; choose one: {', '.join(POOLINGS)}")
            return self.pooling
        if pooling not in POOLINGS:
            raise UserError(f"pooling must be one of {', '.join(POOLINGS)}, not {pooling!r:.60}")
        return pooling


@dataclass(frozen=True)
class EmbeddingOutput:
    """A prompt's final hidden states, pooled into one vector."""

    key: Any
    prompt_token_ids: list[int]
    embedding: list[float]
    """Vector with one number per hidden dimension; scaled to length 1 only by ``normalized``."""
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""

    def normalized(self) -> EmbeddingOutput:
        """Copy with a vector of Euclidean length 1; a zero vector stays zero."""
        length = math.hypot(*self.embedding)
        return replace(self, embedding=[number / length for number in self.embedding]) if length else self
