"""``/v1/embeddings``: OpenAI's Embeddings API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response

from labinfer.base.pooling import EmbeddingOutput
from labinfer.base.sampling_params import SamplingParams
from labinfer.requests.generation_input import GenerationInput
from labinfer.requests.openai.embeddings import EmbeddingList, embedding_list
from labinfer.requests.prompts import Prompt
from labinfer.requests.protocol import EmbeddingBody
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

    checked(lambda: body.check_dimensions(model.info.hidden_size))
    outputs = await embed(context, model, body.prompts, body.pooling, body.user, normalize=body.normalize)

    def whole() -> Response:
        return context.json(embedding_list(outputs, model.info.name, body.encoding_format))

    return await asyncio.to_thread(whole)


async def embed(
    context: HttpContext,
    model: Model,
    parse: Callable[[], list[Prompt]],
    pooling: str | None,
    user: str | None,
    *,
    normalize: bool | None = None,
) -> list[EmbeddingOutput]:
    """Compute the embeddings of a body's prompts, in order.

    Args:
        pooling, normalize: None for the value in the model's files.

    Raises:
        ApiError: ``parse`` raises a ``UserError``, the pooling is invalid, or the task fails.
    """
    own = model.info.pooling
    resolved = checked(lambda: own.resolve(pooling))

    def read() -> GenerationInput:
        return GenerationInput(prompts=parse(), sampling=SamplingParams(), user=user or "", pooling=resolved)

    task = await GenerationTask.start(context, model, read)
    return await asyncio.to_thread(own.finish, await task.outputs(), normalize)
