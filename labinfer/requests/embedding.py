"""PromptEmbedding: the prompts of an embedding request, and the vectors that follow from their pooled hidden states.

HTTP routes, JSONL jobs and the Python API use it alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from labinfer.base.errors import UserError
from labinfer.base.pooling import EmbeddingOutput, PoolingConfig
from labinfer.requests.input_processor import pair_prompts
from labinfer.requests.prompts import PromptLike, TextPrompt, TokensPrompt, token_limit


class EmbeddingModel(Protocol):
    """What embedding needs to know about a model: fields of ``EngineSpec`` and of the gateway's ``ModelInfo``."""

    pooling: PoolingConfig
    hidden_size: int
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class PromptEmbedding:
    """Embeddings of prompts by one model.

    Args:
        pooling: one of ``plan.POOLINGS``; None for the model's default.
        normalize: whether to scale vectors to Euclidean length 1; None for the model's default.
        dimensions: number of leading dimensions of a vector to keep, before it is scaled (Kusupati et al. 2022,
            "Matryoshka Representation Learning", arXiv:2205.13147); None for all.
        prompt_name: key of ``PoolingConfig.prompts``, the text to put before each prompt; None for no text.
        truncate_prompt_tokens: maximum number of tokens of a prompt. The text is cut before special tokens are added; of token
            ids the first are kept. -1 for the model's maximum; None for no cut, so that a longer prompt is an error.

    Raises:
        UserError: the model gives no embeddings, or does not support one of the options.
    """

    model: EmbeddingModel
    given: PromptLike | list[PromptLike]
    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        self.model.pooling.resolve(self.pooling)
        if self.dimensions is not None:
            self._check_dimensions(self.model.hidden_size)
        token_limit(self.truncate_prompt_tokens, self.model.max_model_len)
        known = self.model.pooling.prompts
        if self.prompt_name is not None and self.prompt_name not in known:
            names = f"choose one of {', '.join(known)}" if known else "the model's files have no prompts; leave it out"
            raise UserError(f"prompt_name {self.prompt_name!r:.60} is unknown: {names}")

    @property
    def pooled_by(self) -> str:
        """Pooling of the requests."""
        return self.model.pooling.resolve(self.pooling)

    def prompts(self) -> PromptLike | list[PromptLike]:
        """The prompts to embed.

        Raises:
            UserError: ``prompt_name`` or ``truncate_prompt_tokens`` is given with prompts of another kind.
        """
        if self.prompt_name is None and self.truncate_prompt_tokens is None:
            return self.given
        return [self._prepare(prompt) for prompt, _ in pair_prompts(self.given, None)]

    def outputs(self, pooled: list[EmbeddingOutput]) -> list[EmbeddingOutput]:
        """Embedding of each prompt, by the pooled outputs of ``prompts`` in order."""
        if self.dimensions is not None:
            pooled = [replace(output, embedding=output.embedding[: self.dimensions]) for output in pooled]
        normalizes = self.model.pooling.normalize if self.normalize is None else self.normalize
        return [output.normalized() for output in pooled] if normalizes else pooled

    def _check_dimensions(self, width: int) -> None:
        """Check that the model's vectors, of ``width`` dimensions, can be cut to ``dimensions``."""
        allowed, number = self.model.pooling.matryoshka_dimensions, self.dimensions
        if type(number) is not int or not 1 <= number <= width:
            raise UserError(
                f"dimensions {number!r:.40} is not supported: this model's embeddings have {width} dimensions; choose 1 to {width}"
            )
        if allowed and number not in (*allowed, width):
            names = ", ".join(map(str, sorted({*allowed, width})))
            raise UserError(
                f"dimensions {number} is not supported: matryoshka_dimensions in the model's config.json; choose one of {names}"
            )

    def _prepare(self, prompt: Any) -> PromptLike:
        """``prompt`` with the named prompt before its text, and with its limit."""
        limit = token_limit(self.truncate_prompt_tokens, self.model.max_model_len)
        if isinstance(prompt, str | TextPrompt):
            start = self.model.pooling.prompts[self.prompt_name] if self.prompt_name is not None else ""
            return TextPrompt(start + (prompt if isinstance(prompt, str) else prompt.text), limit)
        if isinstance(prompt, dict) and prompt.get("messages") is None:
            keys = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
            return prompt | {key: self._prepare(prompt[key]) for key in keys}
        if self.prompt_name is not None:
            raise UserError(f"prompt_name needs texts, not token ids or messages: {prompt!r:.60}; leave it out")
        ids = prompt.token_ids if isinstance(prompt, TokensPrompt) else prompt
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise UserError(
                f"truncate_prompt_tokens needs texts or token ids, not messages: {prompt!r:.60}; leave it out"
            )
        return TokensPrompt(ids[:limit])
