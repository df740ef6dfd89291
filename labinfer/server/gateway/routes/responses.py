"""``/v1/responses``: OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from starlette.responses import Response as HttpResponse

from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ApiError
from labinfer.requests.openai.response_body import CountBody, ResponseBody
from labinfer.requests.openai.response_events import STREAM_EVENTS, ResponseWriter
from labinfer.requests.openai.response_items import Item
from labinfer.requests.openai.responses import (
    RESPONSE_PREFIX,
    InputTokens,
    ItemList,
    Response,
    ResponseDeleted,
    new_response,
)
from labinfer.requests.outputs import Completion
from labinfer.server.gateway.endpoint import BODY_ERRORS, GENERATION_ERRORS, STORED_ERRORS, endpoint
from labinfer.server.gateway.event_stream import EventStream, StreamForm, named_event
from labinfer.server.gateway.generation_task import GenerationTask, count_prompt_tokens
from labinfer.server.gateway.http_context import JSON, HttpContext
from labinfer.server.gateway.page import Page, page_query
from labinfer.server.gateway.refusals import checked
from labinfer.server.gateway.stored_responses import StoredResponse
from labinfer.text.reply_reader import ReplyReader

MAX_PAGE = 100
"""Maximum number of input items per page."""


@endpoint("POST", "/v1/responses", body=ResponseBody, answer=Response, events=STREAM_EVENTS, errors=GENERATION_ERRORS)
async def create(context: HttpContext) -> HttpResponse | EventStream:
    """Answer a conversation, which may continue a stored response."""
    body = await context.read(ResponseBody)
    conversation = await _response_input(context, body)
    model = context.service.model(body.model)  # before any await, during which the model may be replaced
    task = await GenerationTask.start(context, model, lambda: body.parse(conversation.items, model.chat_defaults()))
    answer = ResponseAnswer(context, body, conversation, task)
    if task.input.stream:
        return task.stream(answer.events(), StreamForm(end=b"", error=answer.failure))
    (output,) = await task.outputs()
    stored = await asyncio.to_thread(answer.whole, output.completions[0])
    answer.store(stored)
    return HttpResponse(stored.response, headers=context.headers, media_type=JSON)


@dataclass(frozen=True)
class ResponseInput:
    """The whole conversation of a request: stored items of earlier responses, and items of the request."""

    before: list[Item]
    """Items of the responses that this request continues."""
    input: list[Item]
    """Items of this request; references are resolved."""

    @property
    def items(self) -> list[Item]:
        """All items of the conversation, in order."""
        return self.before + self.input


async def _response_input(context: HttpContext, body: CountBody) -> ResponseInput:
    """Collect the items of the responses that the request continues, and the request's own items with references
    resolved.

    Raises:
        ApiError: a response or an item that the request refers to is not stored.
    """
    store, owner, previous_id = context.service.stored_responses, context.caller.name, body.previous_response_id
    items, places = body.items(), dict[str, StoredResponse]()
    chain = store.chain(owner, previous_id)
    if previous_id is not None and (not chain or chain[0].previous_id is not None):
        missing = chain[0].previous_id if chain else previous_id
        raise api_errors.bad_request(
            f"previous_response_id: no stored response with id {missing!r:.80}; send the whole conversation as input",
            "previous_response_id",
            "previous_response_not_found",
        )
    for item in items:
        if item.is_reference:
            place = store.get_by_item(owner, item.id)
            if place is None:
                message = f"input: no stored item with id {item.id!r:.80}; send the item itself"
                raise api_errors.bad_request(message, "input")
            places[item.id] = place
    if not chain and not places:
        return ResponseInput([], items)
    referred_to = {stored.id: stored for stored in places.values()}
    context.charge_body_memory(sum(stored.num_bytes for stored in (*chain, *referred_to.values())))

    def read() -> ResponseInput:
        before = msgspec.convert([item for stored in chain for item in stored.items()], list[Item])
        present = {item.id for item in before}
        by_response = {id: {item["id"]: item for item in stored.items()} for id, stored in referred_to.items()}
        kept = [item for item in items if not (item.is_reference and item.id in present)]
        return ResponseInput(
            before,
            [
                msgspec.convert(by_response[places[item.id].id][item.id], Item) if item.is_reference else item
                for item in kept
            ],
        )

    return await asyncio.to_thread(read)


class ResponseAnswer:
    """Makes the response to a request, as a whole or as a stream, and stores it when it is complete."""

    def __init__(self, context: HttpContext, body: ResponseBody, conversation: ResponseInput, task: GenerationTask):
        self._context, self._body, self._response_input, self._task = context, body, conversation, task
        name = context.id
        if context.service.stored_responses.get(context.caller.name, RESPONSE_PREFIX + name) is not None:
            name = uuid.uuid4().hex  # the client reuses a request id, and both responses are kept
            task.names.add(name)
        (state,), tokenizer = task.opened, task.model.reader.tokenizer
        self._reader = ReplyReader(tokenizer, state.prompt_token_ids, task.input.tool_use)
        response = new_response(RESPONSE_PREFIX + name, self._now(), task.model_name, body, task.input.sampling)
        self._writer = ResponseWriter(response, tokenizer)

    def whole(self, completion: Completion) -> StoredResponse:
        """Make the stored response from a complete answer."""
        writer, events = self._writer, self._reader.read(completion.text or "", completion.finish_reason)
        deque(writer.add(events, completion.logprobs), maxlen=0)
        deque(writer.end(completion.finish_reason, self._task.usage([self._reader]), self._now()), maxlen=0)
        return self._stored()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield every event of a stream, encoded."""
        writer = self._writer
        for event in writer.begin():
            yield named_event(event)
        async for _, delta in self._task.deltas():
            is_last = delta.finish_reason is not None
            for event in writer.add(self._reader.read(delta.text or "", delta.finish_reason), delta.logprobs):
                yield named_event(event)
            if is_last:
                last = list(writer.end(delta.finish_reason, self._task.usage([self._reader]), self._now()))
                self.store(self._stored())
                for event in last:
                    yield named_event(event)

    def failure(self, error: ApiError) -> bytes:
        """Make the last event of a stream that fails with ``error``."""
        return named_event(self._writer.fail(error.message))

    def store(self, stored: StoredResponse) -> None:
        """Store the response, unless the request has ``store: false``."""
        if self._body.store is not False:
            self._context.service.stored_responses.put(self._context.caller.name, stored)

    def _stored(self) -> StoredResponse:
        items = [item.as_stored() for item in self._response_input.input]
        return StoredResponse.make(self._body.previous_response_id, self._writer.response, items)

    def _now(self) -> int:
        return int(self._context.service.wall_clock())


@endpoint("POST", "/v1/responses/input_tokens", body=CountBody, answer=InputTokens, errors=BODY_ERRORS)
async def count(context: HttpContext) -> HttpResponse:
    """Count the tokens of a response's prompt."""
    body = await context.read(CountBody)
    conversation = await _response_input(context, body)
    model = context.service.model(body.model)  # before any await, during which the model may be replaced
    return context.json(InputTokens(await count_prompt_tokens(context, model, lambda: body.prompt(conversation.items))))


@endpoint("GET", "/v1/responses/{id}", answer=Response, query=(("stream", {"enum": ["false"]}),), errors=STORED_ERRORS)
async def show(context: HttpContext) -> HttpResponse:
    """Show a stored response of this caller."""
    stream = context.known_query().get("stream", "false")
    if stream != "false":
        raise api_errors.bad_request(
            f"stream={stream:.60} is not supported for a stored response; leave it out", "stream"
        )
    return HttpResponse(_stored(context).response, headers=context.headers, media_type=JSON)


@endpoint("DELETE", "/v1/responses/{id}", answer=ResponseDeleted, errors=STORED_ERRORS)
async def delete(context: HttpContext) -> HttpResponse:
    """Delete a stored response of this caller."""
    stored = _stored(context)
    context.service.stored_responses.delete(context.caller.name, stored.id)
    return context.json(ResponseDeleted(stored.id))


@endpoint("POST", "/v1/responses/{id}/cancel", statuses=(), errors=STORED_ERRORS)
async def cancel(context: HttpContext) -> HttpResponse:
    """Cancel a background response: always refused, as no response runs in the background."""
    _stored(context)
    raise api_errors.bad_request("only background responses can be cancelled, and this server has none")


@endpoint("GET", "/v1/responses/{id}/input_items", answer=ItemList, query=page_query(MAX_PAGE), errors=STORED_ERRORS)
async def input_items(context: HttpContext) -> HttpResponse:
    """List the input items of a stored response: the whole conversation that it answers."""
    stored = _stored(context)
    page = checked(lambda: Page.read(context.known_query(), MAX_PAGE))
    chain = context.service.stored_responses.chain(context.caller.name, stored.id)

    def cut() -> HttpResponse:
        items = [item for before in chain[:-1] for item in before.items()] + stored.input_items()
        return context.json(ItemList(**page.cut(items, lambda item: item["id"])))

    return await asyncio.to_thread(cut)


def _stored(context: HttpContext) -> StoredResponse:
    """Return the stored response whose id is in the path.

    Raises:
        ApiError: the caller has no such response.
    """
    id = context.http.path_params["id"]
    stored = context.service.stored_responses.get(context.caller.name, id)
    if stored is None:
        raise api_errors.not_found_object("response", id)
    return stored
