"""PoolingConfig: how a model's hidden states are pooled; EmbeddingOutput: the vector that a request comes to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.plan import POOLINGS


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Pooling of requests that do not name one, as the checkpoint's files say."""

    pooling: str = "last"
    """One of ``plan.POOLINGS``."""
    normalize: bool = True
    """Whether vectors are divided by their length."""
    is_embedder: bool = False
    """Whether the files say that the model gives embeddings: cosines of other models' hidden states mean nothing."""
    refusal: str = ""
    """A reason why the vectors that the files ask for cannot be computed; empty where they can."""

    default_prompt: str = ""
    """Name of the prompt that sentence-transformers would put before every text; it is not put there here."""

    @property
    def warning(self) -> str:
        """A line for the log of a start; empty where there is nothing to say."""
        if self.refusal:
            return f"embeddings: {self.refusal}"
        if self.default_prompt:
            return (
                f"embeddings: sentence-transformers puts the prompt {self.default_prompt!r} before every text (default_prompt_name); "
                "here texts are embedded as they are sent"
            )
        return ""

    def resolve(self, pooling: str | None) -> str:
        """The pooling of a request.

        Args:
            pooling: as the request has it; None for the model's own.

        Raises:
            UserError: there is no such pooling, or the request names none and the model's own cannot be computed.
        """
        if pooling is None:
            if self.refusal:
                raise UserError(f"pooling: {self.refusal}; name a pooling: {', '.join(POOLINGS)}")
            return self.pooling
        if pooling not in POOLINGS:
            raise UserError(f"pooling must be one of {', '.join(POOLINGS)}, not {pooling!r:.60}")
        return pooling

    def finish(self, outputs: list[EmbeddingOutput], normalize: bool | None) -> list[EmbeddingOutput]:
        """Outputs with vectors of length 1, where those are wanted.

        Args:
            normalize: as the request has it; None for the model's own.
        """
        normalizes = self.normalize if normalize is None else normalize
        return [output.normalized() for output in outputs] if normalizes else outputs

    def check_scores(self, pooling: str | None) -> None:
        """Refuse cosines of vectors that are no embeddings.

        Args:
            pooling: as the request has it. Who names one knows what is compared.

        Raises:
            UserError: the model is no embedder.
        """
        if self.resolve(pooling) and pooling is None and not self.is_embedder:
            raise UserError(
                "pooling: by its files this model is no embedder (modules.json has no Pooling, the architecture is no base model), so "
                "cosines of its vectors are no scores; rerankers that read both texts at once are not supported yet. To get "
                f"cosines anyway, name a pooling: {', '.join(POOLINGS)}"
            )


@dataclass(frozen=True)
class EmbeddingOutput:
    """A prompt's final hidden states, pooled into one vector."""

    key: Any
    prompt_token_ids: list[int]
    embedding: list[float]
    """Numbers of the vector, one for each dimension of the hidden size; unscaled until ``normalized``."""
    num_cached_tokens: int
    """Prompt tokens that were found in the KV cache."""

    def normalized(self) -> EmbeddingOutput:
        """The same, of Euclidean length 1; zeros stay zeros."""
        length = math.hypot(*self.embedding)
        return replace(self, embedding=[number / length for number in self.embedding]) if length else self
