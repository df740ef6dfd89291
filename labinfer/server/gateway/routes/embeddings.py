"""``/v1/embeddings``: OpenAI's Embeddings API."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from labinfer.base.pooling import EmbeddingOutput
from labinfer.base.sampling_params import SamplingParams
from labinfer.requests.embedding import PromptEmbedding
from labinfer.requests.generation_input import GenerationInput
from labinfer.requests.openai.embeddings import EmbeddingList, embedding_list
from labinfer.requests.protocol import EmbeddingBody
from labinfer.requests.scoring import Classification, PairScoring
from labinfer.server.gateway.endpoint import GENERATION_ERRORS, endpoint
from labinfer.server.gateway.generation_task import GenerationTask
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.refusals import checked
from labinfer.server.gateway.service import Model


@endpoint("POST", "/v1/embeddings", body=EmbeddingBody, answer=EmbeddingList, errors=GENERATION_ERRORS)
async def answer(context: HttpContext) -> Response:
    """Compute embeddings of texts."""
    body = await context.read(EmbeddingBody)
    model = context.service.model(body.model)

    work = checked(lambda: body.embedding(model.info))
    pooled = await pool_prompts(context, model, work, body.user)

    def whole() -> Response:
        return context.json(embedding_list(work.outputs(pooled), model.info.name, body.encoding_format))

    return await asyncio.to_thread(whole)


async def pool_prompts(
    context: HttpContext, model: Model, work: PromptEmbedding | PairScoring | Classification, user: str | None
) -> list[EmbeddingOutput]:
    """Pooled hidden states of the prompts of ``work``, in order.

    Raises:
        ApiError: a prompt is invalid, or the task fails.
    """

    def read() -> GenerationInput:
        return GenerationInput(
            prompts=work.prompts(), sampling=SamplingParams(), user=user or "", pooling=work.pooled_by
        )

    task = await GenerationTask.start(context, model, read)
    return await task.outputs()
