"""``/v1/completions``: OpenAI's Completions API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from labinfer.requests.generation_input import read_completion
from labinfer.requests.openai.api_object import or_unset, prompt_logprobs, total_usage
from labinfer.requests.openai.completions import (
    COMPLETION_PREFIX,
    Echo,
    TextChunkChoice,
    TextCompletion,
    TextCompletionChunk,
    TextLogprobs,
    emptied,
    text_choice,
    text_logprobs,
    without_tokens,
)
from labinfer.requests.outputs import Delta
from labinfer.requests.prompts import TextPrompt
from labinfer.requests.protocol import CompletionBody
from labinfer.server.gateway.endpoint import GENERATION_ERRORS, endpoint
from labinfer.server.gateway.event_stream import EventStream, event
from labinfer.server.gateway.generation_task import GenerationTask
from labinfer.server.gateway.http_context import HttpContext
from labinfer.text.token_offsets import TokenOffsets


@endpoint(
    "POST",
    "/v1/completions",
    body=CompletionBody,
    answer=TextCompletion,
    events=(TextCompletionChunk,),
    errors=GENERATION_ERRORS,
)
async def answer(context: HttpContext) -> Response | EventStream:
    """Generate continuations of texts.

    The answers to the i-th of several prompts begin at choice ``i * n``.
    """
    body = await context.read(CompletionBody)
    model = context.service.model(body.model)
    task = await GenerationTask.start(context, model, lambda: read_completion(body, model.completion_defaults()))
    fields = context.answer_fields(COMPLETION_PREFIX, task.model_name) | {"system_fingerprint": model.info.fingerprint}
    if task.input.stream:
        return task.stream(CompletionStream(fields, task).events())
    outputs = await task.outputs()

    def whole() -> Response:
        choices, given = [], list(map(without_tokens, outputs)) if task.input.prompt_alone else outputs
        for number, output in enumerate(given):
            echo = _echo(task, number)
            for completion in output.completions:
                index = number * task.input.sampling.n + completion.index
                choices.append(text_choice(completion, output, model.reader.tokenizer, echo, index))
        return context.json(TextCompletion(**fields, choices=choices, usage=total_usage(given)))

    return await asyncio.to_thread(whole)  # in a thread, as converting thousands of logprobs takes a while


class CompletionStream:
    """Makes the chunks of a streamed text completion from the deltas of a task.

    Args:
        fields: id, creation time, model and fingerprint of every chunk.
    """

    def __init__(self, fields: dict[str, Any], task: GenerationTask):
        self._fields, self._task, self._input = fields, task, task.input
        self._tokenizer = task.model.reader.tokenizer
        self._offsets: dict[int, TokenOffsets] = {}  # text offsets by choice index

    async def events(self) -> AsyncIterator[bytes]:
        """Yield every chunk, encoded."""
        async for number, delta in self._task.deltas():
            choice = self._choice(number, delta)
            if choice is not None:
                yield self._send([choice])
        if self._input.include_usage:
            yield self._send([], is_last=True)

    def _choice(self, number: int, delta: Delta) -> TextChunkChoice | None:
        """Make the choice of a chunk from a delta of prompt ``number``; None if there is nothing to send."""
        if self._input.prompt_alone:
            delta = emptied(delta)
        index = number * self._input.sampling.n + delta.index
        is_first = index not in self._offsets
        echo = _echo(self._task, number) if is_first else None
        text = (echo.text if echo else "") + (delta.text or "")
        logprobs = self._logprobs(index, delta, echo)
        token_ids = delta.token_ids if delta.text is None else None  # the checkpoint has no tokenizer
        if not (is_first or text or logprobs or token_ids or delta.finish_reason is not None):
            return None
        return TextChunkChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            token_ids=or_unset(token_ids),
            stop_reason=or_unset(delta.stop_reason),
            prompt_logprobs=prompt_logprobs(
                self._task.opened[number].prompt_logprobs if is_first else None, self._tokenizer
            ),
        )

    def _logprobs(self, index: int, delta: Delta, echo: Echo | None) -> TextLogprobs | None:
        offsets = self._offsets.setdefault(index, TokenOffsets(self._tokenizer))
        if delta.logprobs is None:
            return None
        return text_logprobs(delta.token_ids, delta.logprobs, self._tokenizer, echo, offsets)

    def _send(self, choices: list[TextChunkChoice], is_last: bool = False) -> bytes:
        usage = None if self._input.include_usage else UNSET
        if is_last or self._input.continuous_usage:
            usage = self._task.usage()
            if self._input.prompt_alone:
                usage = msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
        return event(TextCompletionChunk(**self._fields, usage=usage, choices=choices))


def _echo(task: GenerationTask, number: int) -> Echo | None:
    """Text, token ids and logprobs of prompt ``number``, if the request has ``echo``; otherwise None."""
    if not task.input.echo:
        return None
    opened, tokenizer = task.opened[number], task.model.reader.tokenizer
    token_ids, prompt = opened.prompt_token_ids, task.input.prompts[number]
    text = prompt.text if isinstance(prompt, TextPrompt) else tokenizer.decode(token_ids) if tokenizer else ""
    return Echo(text, token_ids, opened.prompt_logprobs)
