"""``/v1/messages``: Anthropic's Messages API."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from starlette.responses import Response

from labinfer.requests.anthropic.errors import anthropic_error, no_threads
from labinfer.requests.anthropic.message_body import MessageBody, PromptBody
from labinfer.requests.anthropic.messages import MESSAGE_PREFIX, MessageWriter, Ping, TokenCount, stop_reason
from labinfer.requests.openai.answer import Usage
from labinfer.requests.outputs import Completion
from labinfer.server.gateway.call import Call
from labinfer.server.gateway.event_stream import EventStream, StreamForm, named_event
from labinfer.server.gateway.generation_task import GenerationTask, count_prompt_tokens
from labinfer.text.reply_reader import ReplyReader

FORM = StreamForm(
    end=b"", keep_alive=named_event(Ping()), error=lambda error: named_event(anthropic_error(error, None))
)


async def create(call: Call) -> Response | EventStream:
    """``POST /v1/messages``, as Anthropic's."""
    body = await call.read(MessageBody)
    if body.thread is not None:
        raise no_threads()
    model = call.service.model(body.model)
    task = await GenerationTask.start(call, model, lambda: body.parse(model.chat_defaults()))
    answer = MessageAnswer(call, body, task)
    if task.input.stream:
        return task.stream(answer.events(), FORM)
    (output,) = await task.outputs()
    return await asyncio.to_thread(answer.whole, output.completions[0])


class MessageAnswer:
    """The answer to a request, whole or as a stream."""

    def __init__(self, call: Call, body: MessageBody, task: GenerationTask):
        self._call, self._task = call, task
        (self._state,) = task.opened
        self._reader = ReplyReader(task.model.reader.tokenizer, self._state.prompt_token_ids, task.input.tool_use)
        self._writer = MessageWriter(MESSAGE_PREFIX + call.id, task.model_name, self._usage(), body.shows_thoughts)

    def whole(self, completion: Completion) -> Response:
        """The message of an answer that has come."""
        writer = self._writer
        deque(writer.add(self._reader.read(completion.text or "", completion.finish_reason)), maxlen=0)
        reason = self._reader.finish_reason(completion.finish_reason)
        deque(writer.end(*stop_reason(reason, completion.stop_reason), self._usage()), maxlen=0)
        return self._call.json(writer.message)

    async def events(self) -> AsyncIterator[bytes]:
        """Every event, encoded."""
        writer = self._writer
        for event in writer.begin():
            yield named_event(event)
        async for _, delta in self._task.deltas():
            is_last = delta.finish_reason is not None
            for event in writer.add(self._reader.read(delta.text or "", delta.finish_reason)):
                yield named_event(event)
            if is_last:
                reason = self._reader.finish_reason(delta.finish_reason)
                for event in writer.end(*stop_reason(reason, delta.stop_reason), self._usage()):
                    yield named_event(event)

    def _usage(self) -> Usage:
        return self._task.usage(self._reader.num_reasoning_tokens(self._state.answers[0].token_ids))


async def count(call: Call) -> Response:
    """``POST /v1/messages/count_tokens``: the length of the prompt that a body would have."""
    body = await call.read(PromptBody)
    model = call.service.model(body.model)
    return call.json(TokenCount(await count_prompt_tokens(call, model, body.prompt)))
