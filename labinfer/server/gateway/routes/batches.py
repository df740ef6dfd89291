"""``/v1/batches``: OpenAI's Batch API."""

from __future__ import annotations

import secrets

from starlette.responses import Response

from labinfer.requests.openai.files import Batch, BatchBody, BatchList
from labinfer.requests.protocol import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL
from labinfer.server.gateway.call import Call
from labinfer.server.gateway.page import Page
from labinfer.server.gateway.refusals import checked
from labinfer.server.gateway.routes import chat, completions, embeddings, responses
from labinfer.server.gateway.routes.files import file_store

HANDLERS = {
    CHAT_URL: chat.answer,
    COMPLETIONS_URL: completions.answer,
    EMBEDDINGS_URL: embeddings.answer,
    "/v1/responses": responses.create,
}
"""Routes that lines of a batch may be for."""
MAX_PAGE = 100


async def create(call: Call) -> Response:
    """``POST /v1/batches``."""
    file_store(call)
    body = await call.read(BatchBody)
    batch = Batch(
        id=f"batch_{secrets.token_hex(12)}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=int(call.service.wall_clock()),
        metadata=body.metadata,
    )
    call.http.app.state.batches.create(call.caller, batch)
    return call.json(batch)


async def list_batches(call: Call) -> Response:
    """``GET /v1/batches``."""
    page = checked(lambda: Page.read(call.http.query_params, MAX_PAGE))
    batches = file_store(call).batches(call.caller.owner)
    return call.json(BatchList(**page.cut(batches, lambda batch: batch.id)))


async def show(call: Call) -> Response:
    """``GET /v1/batches/{id}``."""
    return call.json(file_store(call).batch(call.caller.owner, call.http.path_params["id"]))


async def cancel(call: Call) -> Response:
    """``POST /v1/batches/{id}/cancel``."""
    file_store(call)
    return call.json(call.http.app.state.batches.cancel(call.caller.owner, call.http.path_params["id"]))
