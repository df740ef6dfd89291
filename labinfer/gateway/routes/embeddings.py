"""``/v1/embeddings``."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from labinfer.gateway.active_call import ActiveCall
from labinfer.gateway.call import Call
from labinfer.gateway.call_requests import CallRequests
from labinfer.gateway.refusals import checked
from labinfer.openai.embeddings import embedding_list
from labinfer.protocol import EmbeddingBody
from labinfer.sampling_params import SamplingParams


async def answer(call: Call) -> Response:
    """``POST /v1/embeddings``, as OpenAI's."""
    body = await call.read(EmbeddingBody)
    model = call.service.model(body.model)

    checked(lambda: body.check_dimensions(model.info.hidden_size))
    maker = CallRequests(
        call, model, checked(body.prompts), SamplingParams(), user=body.user or "", pooling=body.pooling
    )
    active = await ActiveCall.start(call, model, maker, streams=False, user=body.user)
    outputs = await active.outputs()

    def whole() -> Response:
        return call.json(embedding_list(outputs, model.info.name, body.encoding_format))

    return await asyncio.to_thread(whole)
