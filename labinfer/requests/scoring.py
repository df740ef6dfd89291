"""PairScoring and Classification: the prompts of scores and classes, and the outputs that follow from their vectors.

HTTP routes, JSONL jobs and the Python API use them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from labinfer.base.errors import UserError
from labinfer.base.plan import POOLINGS
from labinfer.base.pooling import EmbeddingOutput, PoolingConfig
from labinfer.base.score_head import ScoreHead
from labinfer.requests.prompts import PairPrompt, Prompt, PromptLike, TextPrompt, token_limit
from labinfer.text.pair_text import PairText

LAST = "last"
"""Pooling of a model with a score head, which reads a prompt's last token."""


class ScoredModel(Protocol):
    """What scoring needs to know about a model: fields of ``EngineSpec`` and of the gateway's ``ModelInfo``."""

    pooling: PoolingConfig
    score_head: ScoreHead | None
    hidden_size: int
    max_model_len: int


@dataclass(frozen=True)
class ScoringOutput:
    """Score of one pair of texts: a relevance by the model's score head, or the cosine similarity of two embeddings."""

    key: Any
    """Index of the pair of texts in the call."""
    prompt_token_ids: list[int]
    """Token ids of the pair; of the first text and then the second, if the score is a cosine similarity."""
    score: float
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


@dataclass(frozen=True)
class ClassificationOutput:
    """Scores of all labels for one prompt."""

    key: Any
    prompt_token_ids: list[int]
    probs: list[float]
    """Score of each label, after the activation."""
    label: str
    """Name of the label with the largest score."""
    num_cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class PairScoring:
    """Scores of pairs of texts by one model.

    Args:
        first: texts, one for all of ``second`` or equally many.
        use_activation: False for logits of the score head in place of scores from 0 to 1.
        truncate_prompt_tokens: maximum number of tokens of a pair, to which its document is cut; -1 for the model's maximum; None
            for no cut, so that a pair that is too long is an error.
        pooling: pooling for cosine similarities; None for the model's default.

    Raises:
        UserError: the model gives no scores, or does not support one of the options.
    """

    model: ScoredModel
    first: list[str]
    second: list[str]
    use_activation: bool | None = None
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    pooling: str | None = None

    def __post_init__(self) -> None:
        head = self.model.score_head
        if head is not None:
            head.check_pairs()
            check_last_token(self.pooling)
            token_limit(self.truncate_prompt_tokens, self.model.max_model_len)
            return
        check_cosines(self.model.pooling, self.pooling)
        for name in ("use_activation", "instruction", "truncate_prompt_tokens"):
            if getattr(self, name) is not None:
                raise UserError(
                    f"{name}: this model has no score head, and its scores are cosine similarities; leave it out"
                )

    @property
    def pooled_by(self) -> str:
        """Pooling of the requests."""
        return LAST if self.model.score_head is not None else self.model.pooling.resolve(self.pooling)

    def prompts(self) -> list[Prompt]:
        """A prompt for each pair; for cosine similarities, one for each text of ``first`` and then of ``second``."""
        head = self.model.score_head
        if head is None:
            return list(map(TextPrompt, self.first + self.second))
        limit = token_limit(self.truncate_prompt_tokens, self.model.max_model_len)
        fields = {"instruction": self.instruction or head.instruction, "template": head.template, "limit": limit}
        return [PairPrompt(PairText(query=query, document=document, **fields)) for query, document in self._pairs()]

    def outputs(self, pooled: list[EmbeddingOutput]) -> list[ScoringOutput]:
        """Score of each pair, by the pooled outputs of ``prompts`` in order."""
        head = self.model.score_head
        if head is not None:
            scored = [(head.relevance(each.embedding, self.use_activation), [each]) for each in pooled]
        else:
            pairs = zip(self._repeated(pooled[: len(self.first)]), pooled[len(self.first) :], strict=True)
            scored = [(cosine(left, right), [left, right]) for left, right in pairs]
        return [
            ScoringOutput(
                index,
                [token for part in parts for token in part.prompt_token_ids],
                score,
                sum(part.num_cached_tokens for part in parts),
            )
            for index, (score, parts) in enumerate(scored)
        ]

    def _pairs(self) -> list[tuple[str, str]]:
        return list(zip(self._repeated(self.first), self.second, strict=True))

    def _repeated(self, first: list[Any]) -> list[Any]:
        """``first``, repeated for every text of ``second`` if it has one item."""
        return first * len(self.second) if len(first) == 1 else first


@dataclass(frozen=True, kw_only=True)
class Classification:
    """Classes of prompts by a model with a score head.

    Args:
        use_activation: False for the logits of the labels in place of their scores.
        pooling: pooling of the request, which is the last token or None.

    Raises:
        UserError: the model has no score head, or the request names another pooling.
    """

    model: ScoredModel
    given: PromptLike | list[PromptLike]
    use_activation: bool | None = None
    pooling: str | None = None

    pooled_by: ClassVar[str] = LAST

    def __post_init__(self) -> None:
        if self.model.score_head is None:
            raise UserError(
                "model: this model has no classification head (its architecture is not …ForSequenceClassification), so it gives no "
                "classes; use /v1/embeddings"
            )
        check_last_token(self.pooling)

    def prompts(self) -> PromptLike | list[PromptLike]:
        """The prompts to classify."""
        return self.given

    def outputs(self, pooled: Sequence[EmbeddingOutput]) -> list[ClassificationOutput]:
        """Scores of the labels for each prompt, by the pooled outputs of the prompts in order."""
        head, classified = self.model.score_head, []
        for output in pooled:
            probs = head.scores(output.embedding, self.use_activation)
            label = head.labels[max(range(len(probs)), key=probs.__getitem__)]
            classified.append(
                ClassificationOutput(output.key, output.prompt_token_ids, probs, label, output.num_cached_tokens)
            )
        return classified


def pair_scoring(model: ScoredModel, queries: Any, documents: Any, **options: Any) -> PairScoring:
    """Scores of the texts that a Python caller gives; ``options`` are further fields of ``PairScoring``.

    Raises:
        UserError: the texts cannot be paired, or the model does not support the request.
    """
    first, second = paired_texts(queries, documents, ("queries", "documents"))
    return PairScoring(model=model, first=first, second=second, **options)


def check_last_token(pooling: str | None) -> None:
    """Refuse a request's ``pooling`` that a score head cannot read.

    Raises:
        UserError: the request names a pooling other than ``last``.
    """
    if pooling not in (None, LAST):
        raise UserError(
            f"pooling {pooling!r:.40} is not supported: this model's score head reads the last token; leave it out"
        )


def check_cosines(config: PoolingConfig, pooling: str | None) -> None:
    """Refuse similarity scores if the vectors are not embeddings, so that their cosines have no meaning.

    Args:
        config: pooling of the model.
        pooling: pooling of the request; naming any pooling permits the scores.

    Raises:
        UserError: the request names no pooling, and the model is not an embedding model.
    """
    if config.resolve(pooling) and pooling is None and not config.is_embedder:
        raise UserError(
            "pooling: this model is not an embedding model (no Pooling in modules.json, and the architecture "
            "is not a base model), so cosine similarities of its vectors are not meaningful scores. For Qwen3-Reranker, "
            "start with --reranker qwen3. To get cosine similarities anyway, choose a pooling: "
            f"{', '.join(POOLINGS)}"
        )


def cosine(left: EmbeddingOutput, right: EmbeddingOutput) -> float:
    """Cosine similarity of two embeddings."""
    return sum(a * b for a, b in zip(left.normalized().embedding, right.normalized().embedding, strict=True))


def paired_texts(first: Any, second: Any, names: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Lists of texts that can be paired: one text with each of the others, or two lists of equal length.

    Args:
        names: names of the two arguments, for errors.

    Raises:
        UserError: an argument is not a text or a list of texts, is empty, or the lengths do not fit.
    """
    lists = [[texts] if isinstance(texts, str) else texts for texts in (first, second)]
    for name, texts in zip(names, lists, strict=True):
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise UserError(f"{name} must be a text or a list of texts, none of them empty, not {texts!r:.60}")
    if len(lists[0]) not in (1, len(lists[1])):
        raise UserError(
            f"{names[0]} has {len(lists[0])} texts and {names[1]} {len(lists[1])}; give one text in {names[0]}, or equally many in both"
        )
    return lists[0], lists[1]
