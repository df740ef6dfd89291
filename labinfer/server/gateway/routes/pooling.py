"""``/pooling``, ``/score`` and ``/rerank``, with vLLM's bodies.

Scores are cosine similarities of embeddings, as in vLLM for embedding models. Models that read both texts together (cross-encoders,
Qwen3-Reranker) are refused.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from labinfer.base.errors import UserError
from labinfer.requests.openai.embeddings import count_tokens
from labinfer.requests.openai.scores import (
    DocumentText,
    PooledList,
    RankedDocument,
    Ranking,
    Score,
    ScoreList,
    cosine_scores,
    pooled_list,
)
from labinfer.requests.prompts import TextPrompt
from labinfer.requests.protocol import MAX_INPUTS, EmbeddingBody, Pooling
from labinfer.server.gateway.endpoint import GENERATION_ERRORS, endpoint
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.refusals import checked
from labinfer.server.gateway.routes.embeddings import embed

InputText = Annotated[str, msgspec.Meta(min_length=1)]
Texts = InputText | Annotated[list[InputText], msgspec.Meta(min_length=1, max_length=MAX_INPUTS)]


class ScoreBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Pairs of texts to score: one ``text_1`` with each ``text_2``, or two lists of equal length."""

    model: str | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    """``queries`` and ``documents`` are vLLM's newer names of ``text_1`` and ``text_2``."""
    user: str | None = None
    pooling: Pooling | None = None

    def pairs(self) -> tuple[list[str], list[str]]:
        """First texts and second texts of all pairs.

        Raises:
            UserError: texts are missing, given twice, or cannot be paired.
        """
        given = [(self.text_1, self.text_2), (self.queries, self.documents)]
        whole = [pair for pair in given if None not in pair]
        if len(whole) != 1 or any(pair != (None, None) for pair in given if pair is not whole[0]):
            raise UserError("text_1 and text_2, or queries and documents: give one pair")
        first, second = ([texts] if isinstance(texts, str) else texts for texts in whole[0])
        if len(first) not in (1, len(second)):
            raise UserError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}; give one text_1, or equally many of both"
            )
        if (total := len(first) + len(second)) > MAX_INPUTS:
            raise UserError(f"text_1 and text_2 have {total} texts, more than {MAX_INPUTS}; send several requests")
        return first, second


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True):
    text: InputText


class RerankBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A query, and documents to rank by their similarity to it."""

    model: str | None = None
    query: InputText
    documents: Annotated[list[InputText | RerankDocument], msgspec.Meta(min_length=1, max_length=MAX_INPUTS - 1)]
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of documents to return; 0 for all."""
    return_documents: bool | None = None
    """False to leave the texts of documents out of the response."""
    user: str | None = None
    pooling: Pooling | None = None


@endpoint("POST", "/pooling", body=EmbeddingBody, answer=PooledList, errors=GENERATION_ERRORS)
async def pool(context: HttpContext) -> Response:
    """Compute embeddings of texts, with vLLM's fields."""
    body = await context.read(EmbeddingBody)
    model = context.service.model(body.model)
    checked(lambda: body.check_dimensions(model.info.hidden_size))
    outputs = await embed(context, model, body.prompts, body.pooling, body.user, normalize=body.normalize)
    fields = context.answer_fields("pool-", model.info.name)
    return await asyncio.to_thread(lambda: context.json(pooled_list(outputs, body.encoding_format, **fields)))


@endpoint("POST", "/score", aliases=("/v1/score",), body=ScoreBody, answer=ScoreList, errors=GENERATION_ERRORS)
async def score(context: HttpContext) -> Response:
    """Compute similarity scores of pairs of texts: cosine similarities of their embeddings."""
    body = await context.read(ScoreBody)
    model = context.service.model(body.model)
    first, second = checked(body.pairs)
    checked(lambda: model.info.pooling.check_scores(body.pooling))
    prompts = list(map(TextPrompt, first + second))
    outputs = await embed(context, model, lambda: prompts, body.pooling, body.user)

    def whole() -> Response:
        scores = cosine_scores(outputs[: len(first)], outputs[len(first) :])
        answer = ScoreList(
            **context.answer_fields("score-", model.info.name),
            data=[Score("score", index, score) for index, score in enumerate(scores)],
            usage=count_tokens(outputs),
        )
        return context.json(answer)

    return await asyncio.to_thread(whole)


@endpoint(
    "POST", "/rerank", aliases=("/v1/rerank", "/v2/rerank"), body=RerankBody, answer=Ranking, errors=GENERATION_ERRORS
)
async def rerank(context: HttpContext) -> Response:
    """Rank documents by their similarity to a query."""
    body = await context.read(RerankBody)
    model = context.service.model(body.model)
    checked(lambda: model.info.pooling.check_scores(body.pooling))
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    prompts = list(map(TextPrompt, [body.query, *texts]))
    outputs = await embed(context, model, lambda: prompts, body.pooling, body.user)

    def whole() -> Response:
        scores = cosine_scores(outputs[:1], outputs[1:])
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            RankedDocument(
                index, scores[index], UNSET if body.return_documents is False else DocumentText(texts[index])
            )
            for index in order[: body.top_n or len(order)]
        ]
        answer = Ranking(id=f"rerank-{context.id}", model=model.info.name, results=results, usage=count_tokens(outputs))
        return context.json(answer)

    return await asyncio.to_thread(whole)
