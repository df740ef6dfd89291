"""``/v1/chat/completions``: OpenAI's Chat Completions API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from labinfer.requests.generation_input import read_chat
from labinfer.requests.openai.api_object import PromptLogprobs, or_unset, prompt_logprobs
from labinfer.requests.openai.chat import (
    CHAT_PREFIX,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    answer_tokens,
    chat_choice,
    chat_logprobs,
    chat_messages,
    first_delta,
    reply_delta,
)
from labinfer.requests.outputs import Delta
from labinfer.requests.protocol import ChatBody
from labinfer.server.gateway.endpoint import GENERATION_ERRORS, endpoint
from labinfer.server.gateway.event_stream import EventStream, event
from labinfer.server.gateway.generation_task import GenerationTask
from labinfer.server.gateway.http_context import HttpContext
from labinfer.text.reply_parts import Reasoning, ToolCall
from labinfer.text.reply_reader import ReplyReader


@endpoint(
    "POST",
    "/v1/chat/completions",
    body=ChatBody,
    answer=ChatCompletion,
    events=(ChatCompletionChunk,),
    errors=GENERATION_ERRORS,
)
async def answer(context: HttpContext) -> Response | EventStream:
    """Generate the model's next message of a conversation."""
    body = await context.read(ChatBody)
    model = context.service.model(body.model)
    task = await GenerationTask.start(context, model, lambda: read_chat(body, model.chat_defaults()))
    fields = context.answer_fields(CHAT_PREFIX, task.model_name) | {"system_fingerprint": model.info.fingerprint}
    if task.input.stream:
        return task.stream(ChatStream(fields, task).events())
    (output,) = await task.outputs()

    def whole() -> Response:
        tokenizer, input = model.reader.tokenizer, task.input
        messages, usage = chat_messages(output, tokenizer, input.tool_use, input.include_reasoning)
        choices = [
            chat_choice(completion, message, output, tokenizer, input.return_drafted)
            for completion, message in zip(output.completions, messages, strict=True)
        ]
        answer = ChatCompletion(
            **fields,
            choices=choices,
            usage=usage,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs, tokenizer),
        )
        return context.json(answer)

    return await asyncio.to_thread(whole)  # in a thread, as converting thousands of logprobs takes a while


class ChatStream:
    """Makes the chunks of a streamed chat completion from the deltas of a task.

    Args:
        fields: id, creation time, model and fingerprint of every chunk.
    """

    def __init__(self, fields: dict[str, Any], task: GenerationTask):
        self._fields, self._task, self._input = fields, task, task.input
        (self._state,) = task.opened
        self._tokenizer, prompt = task.model.reader.tokenizer, self._state.prompt_token_ids
        self._readers = [
            ReplyReader(self._tokenizer, prompt, task.input.tool_use) for _ in range(task.input.sampling.n)
        ]
        self._begun: set[int] = set()  # indices of answers whose first chunk has been sent
        self._has_told_prompt = False  # whether the prompt logprobs have been sent

    async def events(self) -> AsyncIterator[bytes]:
        """Yield every chunk, encoded. The first chunk of an answer has the role. It is not sent before the first token, as clients
        measure TTFT by the first chunk."""
        async for _, delta in self._task.deltas():
            token_fields = self._token_fields(delta)
            for part in self._parts(delta):
                yield self._chunk(delta.index, part, token_fields)
                token_fields = {}
            if token_fields or delta.index not in self._begun:  # the detokenizer holds the text of these tokens back
                yield self._chunk(delta.index, ChatDelta(content=""), token_fields)
            if delta.finish_reason is not None:
                reason = self._readers[delta.index].finish_reason(delta.finish_reason)
                yield self._chunk(delta.index, ChatDelta(), {}, reason, delta.stop_reason)
        if self._input.include_usage:
            yield self._send([], is_last=True)

    def _token_fields(self, delta: Delta) -> dict[str, Any]:
        """Fields of a chunk's choice with data of each token (logprobs, draft flags), if the request asks for such data."""
        fields: dict[str, Any] = {}
        if delta.logprobs:
            fields["logprobs"] = chat_logprobs(delta.logprobs, self._tokenizer)
        if self._input.return_drafted and delta.token_ids:
            fields["tokens"] = answer_tokens(delta.token_ids, delta.drafted, self._tokenizer)
        return fields

    def _parts(self, delta: Delta) -> list[ChatDelta]:
        """Convert a delta of an answer to deltas of the message, in order: pieces of reasoning and content, and tool calls."""
        reader = self._readers[delta.index]
        num_calls, deltas = reader.num_calls, []
        for part in reader.read(delta.text or "", delta.finish_reason):
            if isinstance(part, Reasoning) and not self._input.include_reasoning:
                continue
            deltas.append(reply_delta(part, num_calls, self._input.tool_use.has_functions))
            num_calls += isinstance(part, ToolCall)
        return deltas

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        token_fields: dict[str, Any],
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> bytes:
        measured = None
        if not self._has_told_prompt:
            measured = self._state.prompt_logprobs
            self._has_told_prompt = measured is not None
        if index not in self._begun:
            self._begun.add(index)
            delta = first_delta(delta)
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            finish_reason=finish_reason,
            stop_reason=or_unset(stop_reason),
            **token_fields,
        )
        return self._send([choice], prompt_logprobs(measured, self._tokenizer))

    def _send(
        self,
        choices: list[ChatChunkChoice],
        prompt_logprobs: PromptLogprobs | UnsetType = UNSET,
        is_last: bool = False,
    ) -> bytes:
        usage = None if self._input.include_usage else UNSET
        if is_last or self._input.continuous_usage:
            usage = self._task.usage(self._readers)
        return event(ChatCompletionChunk(**self._fields, usage=usage, choices=choices, prompt_logprobs=prompt_logprobs))
