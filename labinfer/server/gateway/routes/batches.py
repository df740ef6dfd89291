"""``/v1/batches``: OpenAI's Batch API."""

from __future__ import annotations

import secrets

from starlette.responses import Response

from labinfer.requests.openai.files import Batch, BatchBody, BatchList
from labinfer.requests.protocol import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL
from labinfer.server.gateway.endpoint import BODY_ERRORS, STORED_ERRORS, endpoint
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.page import Page, page_query
from labinfer.server.gateway.refusals import checked
from labinfer.server.gateway.routes import chat, completions, embeddings, responses
from labinfer.server.gateway.routes.files import file_store

HANDLERS = {
    CHAT_URL: chat.answer,
    COMPLETIONS_URL: completions.answer,
    EMBEDDINGS_URL: embeddings.answer,
    "/v1/responses": responses.create,
}
"""Handler of each endpoint that a batch supports, by path."""
MAX_PAGE = 100


@endpoint("POST", "/v1/batches", body=BatchBody, answer=Batch, errors=BODY_ERRORS)
async def create(context: HttpContext) -> Response:
    """Create a batch, which answers each line of an uploaded file."""
    file_store(context)
    body = await context.read(BatchBody)
    batch = Batch(
        id=f"batch_{secrets.token_hex(12)}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=int(context.service.wall_clock()),
        metadata=body.metadata,
    )
    context.http.app.state.batches.create(context.caller, batch)
    return context.json(batch)


@endpoint("GET", "/v1/batches", answer=BatchList, query=page_query(MAX_PAGE), errors=STORED_ERRORS)
async def list_batches(context: HttpContext) -> Response:
    """List the caller's batches."""
    page = checked(lambda: Page.read(context.known_query(), MAX_PAGE))
    batches = file_store(context).batches(context.caller.owner)
    return context.json(BatchList(**page.cut(batches, lambda batch: batch.id)))


@endpoint("GET", "/v1/batches/{id}", answer=Batch, errors=STORED_ERRORS)
async def show(context: HttpContext) -> Response:
    """Show one of the caller's batches."""
    return context.json(file_store(context).batch(context.caller.owner, context.http.path_params["id"]))


@endpoint("POST", "/v1/batches/{id}/cancel", answer=Batch, errors=STORED_ERRORS)
async def cancel(context: HttpContext) -> Response:
    """Cancel a batch: lines that are being answered are finished, no other line is begun."""
    file_store(context)
    return context.json(context.http.app.state.batches.cancel(context.caller.owner, context.http.path_params["id"]))
