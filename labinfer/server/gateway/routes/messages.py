"""``/v1/messages``: Anthropic's Messages API."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from starlette.responses import Response

from labinfer.requests.anthropic.errors import anthropic_error, no_threads
from labinfer.requests.anthropic.message_body import MessageBody, PromptBody
from labinfer.requests.anthropic.messages import (
    MESSAGE_PREFIX,
    STREAM_EVENTS,
    AnthropicMessage,
    MessageWriter,
    Ping,
    TokenCount,
    stop_reason,
)
from labinfer.requests.outputs import Completion
from labinfer.server.gateway.endpoint import BODY_ERRORS, GENERATION_ERRORS, endpoint
from labinfer.server.gateway.error_form import ANTHROPIC_ERRORS
from labinfer.server.gateway.event_stream import EventStream, StreamForm, named_event
from labinfer.server.gateway.generation_task import GenerationTask, count_prompt_tokens
from labinfer.server.gateway.http_context import HttpContext
from labinfer.text.reply_reader import ReplyReader

FORM = StreamForm(
    end=b"", keep_alive=named_event(Ping()), error=lambda error: named_event(anthropic_error(error, None))
)


@endpoint(
    "POST",
    "/v1/messages",
    body=MessageBody,
    answer=AnthropicMessage,
    events=STREAM_EVENTS,
    errors=GENERATION_ERRORS,
    error_form=ANTHROPIC_ERRORS,
)
async def create(context: HttpContext) -> Response | EventStream:
    """Answer a conversation, in the format of Anthropic's API."""
    body = await context.read(MessageBody)
    if body.thread is not None:
        raise no_threads()
    model = context.service.model(body.model)
    task = await GenerationTask.start(context, model, lambda: body.parse(model.chat_defaults()))
    answer = MessageAnswer(context, body, task)
    if task.input.stream:
        return task.stream(answer.events(), FORM)
    (output,) = await task.outputs()
    return await asyncio.to_thread(answer.whole, output.completions[0])


class MessageAnswer:
    """Makes the response to a request of Anthropic's API, as a whole or as a stream."""

    def __init__(self, context: HttpContext, body: MessageBody, task: GenerationTask):
        self._context, self._task = context, task
        (state,) = task.opened
        self._reader = ReplyReader(task.model.reader.tokenizer, state.prompt_token_ids, task.input.tool_use)
        self._writer = MessageWriter(
            MESSAGE_PREFIX + context.id, task.model_name, task.usage([self._reader]), body.shows_reasoning
        )

    def whole(self, completion: Completion) -> Response:
        """Make the HTTP response from a complete answer."""
        writer = self._writer
        deque(writer.add(self._reader.read(completion.text or "", completion.finish_reason)), maxlen=0)
        reason = self._reader.finish_reason(completion.finish_reason)
        deque(writer.end(*stop_reason(reason, completion.stop_reason), self._task.usage([self._reader])), maxlen=0)
        return self._context.json(writer.message)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield every event of a stream, encoded."""
        writer = self._writer
        for event in writer.begin():
            yield named_event(event)
        async for _, delta in self._task.deltas():
            is_last = delta.finish_reason is not None
            for event in writer.add(self._reader.read(delta.text or "", delta.finish_reason)):
                yield named_event(event)
            if is_last:
                reason = self._reader.finish_reason(delta.finish_reason)
                for event in writer.end(*stop_reason(reason, delta.stop_reason), self._task.usage([self._reader])):
                    yield named_event(event)


@endpoint(
    "POST",
    "/v1/messages/count_tokens",
    body=PromptBody,
    answer=TokenCount,
    errors=BODY_ERRORS,
    error_form=ANTHROPIC_ERRORS,
)
async def count(context: HttpContext) -> Response:
    """Count the tokens of a message's prompt."""
    body = await context.read(PromptBody)
    model = context.service.model(body.model)
    return context.json(TokenCount(await count_prompt_tokens(context, model, body.prompt)))
