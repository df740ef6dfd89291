"""``/pooling``, ``/score``, ``/rerank`` and ``/classify``, with vLLM's bodies.

A model with a score head (a classifier or reranker) reads both texts of a pair together. Scores of other models are cosine similarities
of embeddings, as in vLLM.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from starlette.responses import Response

from labinfer.requests.openai.scores import ClassificationList, PooledList, Ranking, ScoreList, pooled_list
from labinfer.requests.score_bodies import (
    CLASSIFY_URL,
    RERANK_URLS,
    SCORE_URLS,
    ClassifyBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    ScoreRequest,
)
from labinfer.requests.scoring import Classification
from labinfer.server.gateway.endpoint import GENERATION_ERRORS, endpoint
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.refusals import checked
from labinfer.server.gateway.routes.embeddings import pool_prompts


@endpoint("POST", "/pooling", body=PoolingBody, answer=PooledList, errors=GENERATION_ERRORS)
async def pool(context: HttpContext) -> Response:
    """Compute embeddings of texts, or scores of their labels, with vLLM's fields."""
    body = await context.read(PoolingBody)
    model = context.service.model(body.model)
    work = checked(lambda: body.work(model.info))
    pooled = await pool_prompts(context, model, work, body.user)
    outputs = await asyncio.to_thread(work.outputs, pooled)
    if isinstance(work, Classification):
        outputs = [replace(output, embedding=scored.probs) for output, scored in zip(pooled, outputs, strict=True)]
    fields = context.answer_fields("pool-", model.info.name)
    return await asyncio.to_thread(lambda: context.json(pooled_list(outputs, body.encoding_format, **fields)))


@endpoint("POST", SCORE_URLS[0], aliases=SCORE_URLS[1:], body=ScoreBody, answer=ScoreList, errors=GENERATION_ERRORS)
async def score(context: HttpContext) -> Response:
    """Score pairs of texts, by the model's score head or by cosine similarities of embeddings."""
    return await _answer(context, await context.read(ScoreBody), "score-")


@endpoint("POST", RERANK_URLS[0], aliases=RERANK_URLS[1:], body=RerankBody, answer=Ranking, errors=GENERATION_ERRORS)
async def rerank(context: HttpContext) -> Response:
    """Rank documents by their scores with a query."""
    return await _answer(context, await context.read(RerankBody), "rerank-")


@endpoint("POST", CLASSIFY_URL, body=ClassifyBody, answer=ClassificationList, errors=GENERATION_ERRORS)
async def classify(context: HttpContext) -> Response:
    """Compute the scores of a classifier's labels for texts."""
    return await _answer(context, await context.read(ClassifyBody), "classify-")


async def _answer(context: HttpContext, body: ScoreRequest, prefix: str) -> Response:
    """Compute the scores that ``body`` asks for, and make the response, whose id begins with ``prefix``."""
    model = context.service.model(body.model)
    work = checked(lambda: body.work(model.info))
    pooled = await pool_prompts(context, model, work, body.user)
    fields = context.answer_fields(prefix, model.info.name)
    return await asyncio.to_thread(lambda: context.json(body.answer(work, pooled, **fields)))
