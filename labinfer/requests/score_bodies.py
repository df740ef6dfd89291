"""Bodies of ``/score``, ``/rerank``, ``/classify`` and ``/pooling``, with vLLM's fields (vLLM's documentation, "Pooling models").

A body makes a ``PairScoring`` or a ``Classification``, and the response from the pooled outputs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET

from labinfer.base.errors import UserError
from labinfer.base.pooling import EmbeddingOutput
from labinfer.requests.embedding import PromptEmbedding
from labinfer.requests.openai.embeddings import count_tokens
from labinfer.requests.openai.scores import (
    ClassificationList,
    DocumentText,
    RankedDocument,
    Ranking,
    Score,
    ScoreList,
    classification_list,
)
from labinfer.requests.protocol import MAX_COUNT, MAX_INPUTS, EmbeddingBody, Inputs, Pooling, typed_prompts
from labinfer.requests.scoring import Classification, PairScoring, ScoredModel, paired_texts

SCORE_URLS = ("/score", "/v1/score")
RERANK_URLS = ("/rerank", "/v1/rerank", "/v2/rerank")
CLASSIFY_URL = "/classify"

PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"))
"""Fields of ``ScoreBody`` for the two texts of a pair: vLLM's names, and its newer names."""

InputText = Annotated[str, msgspec.Meta(min_length=1)]
Texts = InputText | Annotated[list[InputText], msgspec.Meta(min_length=1, max_length=MAX_INPUTS)]


class PairFields(msgspec.Struct, kw_only=True):
    """Fields that the bodies of ``/score`` and ``/rerank`` share; see ``PairScoring``."""

    model: str | None = None
    user: str | None = None
    pooling: Pooling | None = None
    use_activation: bool | None = None
    """False for the logits of a score head in place of scores from 0 to 1."""
    instruction: str | None = None
    """Task in words, for rerankers whose template reads an instruction; by default the template's."""
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=MAX_COUNT)] | None = None
    """Maximum number of tokens of query and document together, to which the document is cut; -1 for the model's maximum. By
    default, longer pairs are an error."""

    def _scoring(self, model: ScoredModel, first: list[str], second: list[str]) -> PairScoring:
        names = ("use_activation", "instruction", "truncate_prompt_tokens", "pooling")
        return PairScoring(model=model, first=first, second=second, **{name: getattr(self, name) for name in names})


class ScoreBody(PairFields, kw_only=True, forbid_unknown_fields=True):
    """Pairs of texts to score: one ``text_1`` with each ``text_2``, or two lists of equal length."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    """``queries`` and ``documents`` are vLLM's newer names of ``text_1`` and ``text_2``."""

    def pairs(self) -> tuple[list[str], list[str]]:
        """First texts and second texts of all pairs.

        Raises:
            UserError: texts are missing, given twice, or cannot be paired.
        """
        given = [names for names in PAIR_NAMES if any(getattr(self, name) is not None for name in names)]
        if len(given) != 1 or None in (texts := [getattr(self, name) for name in given[0]]):
            raise UserError("text_1 and text_2, or queries and documents: give one pair")
        first, second = paired_texts(*texts, given[0])
        if (total := len(first) + len(second)) > MAX_INPUTS:
            names = " and ".join(given[0])
            raise UserError(f"{names} have {total} texts, more than {MAX_INPUTS}; send several requests")
        return first, second

    def work(self, model: ScoredModel) -> PairScoring:
        """The scores to compute.

        Raises:
            UserError: the texts cannot be paired, or the model does not support the request.
        """
        first, second = self.pairs()
        return self._scoring(model, first, second)

    def answer(self, work: PairScoring, pooled: list[EmbeddingOutput], **fields: Any) -> ScoreList:
        """Response, by the pooled outputs of the prompts of ``work``. ``fields`` are id, creation time and model."""
        outputs = work.outputs(pooled)
        data = [Score("score", index, output.score) for index, output in enumerate(outputs)]
        return ScoreList(data=data, usage=count_tokens(pooled), **fields)


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True):
    text: InputText


class RerankBody(PairFields, kw_only=True, forbid_unknown_fields=True):
    """A query, and documents to rank by their relevance to it."""

    query: InputText
    documents: Annotated[list[InputText | RerankDocument], msgspec.Meta(min_length=1, max_length=MAX_INPUTS - 1)]
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of documents to return; 0 for all."""
    return_documents: bool | None = None
    """False to leave the texts of documents out of the response."""

    def texts(self) -> list[str]:
        """Texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]

    def work(self, model: ScoredModel) -> PairScoring:
        """The scores to compute.

        Raises:
            UserError: the model does not support the request.
        """
        return self._scoring(model, [self.query], self.texts())

    def answer(self, work: PairScoring, pooled: list[EmbeddingOutput], **fields: Any) -> Ranking:
        """Response, best document first; see ``ScoreBody.answer``."""
        scores = [output.score for output in work.outputs(pooled)]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            RankedDocument(
                index, scores[index], UNSET if self.return_documents is False else DocumentText(work.second[index])
            )
            for index in order[: self.top_n or len(order)]
        ]
        return Ranking(id=fields["id"], model=fields["model"], results=results, usage=count_tokens(pooled))


class ClassifyBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Texts or token ids to classify."""

    input: Inputs
    """A text, token ids, or a list of texts or of lists of token ids."""
    model: str | None = None
    user: str | None = None
    use_activation: bool | None = None
    """False for the logits of the labels in place of their scores."""

    def work(self, model: ScoredModel) -> Classification:
        """The classes to compute.

        Raises:
            UserError: an input is invalid, or the model has no score head.
        """
        return Classification(model=model, given=typed_prompts("input", self.input), use_activation=self.use_activation)

    def answer(self, work: Classification, pooled: list[EmbeddingOutput], **fields: Any) -> ClassificationList:
        """Response; see ``ScoreBody.answer``."""
        return classification_list(work.outputs(pooled), **fields)


class PoolingBody(EmbeddingBody, kw_only=True, forbid_unknown_fields=True):
    """Inputs to embed or to classify: an embeddings request with a ``task``."""

    task: Literal["embed", "classify"] | None = None
    """Kind of output; by default ``classify`` for models with a score head, else ``embed``."""

    def work(self, model: ScoredModel) -> Classification | PromptEmbedding:
        """The classes or embeddings to compute.

        Raises:
            UserError: an input is invalid, or the model does not support the task.
        """
        if self.task == "embed" or (self.task is None and model.score_head is None):
            return self.embedding(model)
        for name in ("dimensions", "prompt_name", "truncate_prompt_tokens"):
            if getattr(self, name) is not None:
                raise UserError(f"{name} is for embeddings, and this request asks for classes; leave it out")
        return Classification(model=model, given=self.prompts(), use_activation=self.normalize, pooling=self.pooling)


ScoreRequest = ScoreBody | RerankBody | ClassifyBody
SCORE_BODIES: dict[str, type[ScoreRequest]] = (
    dict.fromkeys(SCORE_URLS, ScoreBody) | dict.fromkeys(RERANK_URLS, RerankBody) | {CLASSIFY_URL: ClassifyBody}
)
"""Body of each URL of scores and classes."""
