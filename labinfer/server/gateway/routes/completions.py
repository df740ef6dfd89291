"""``/v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from labinfer.requests.generation_input import GenerationInput, read_completion
from labinfer.requests.openai.answer import or_unset, prompt_logprobs, total_usage
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
from labinfer.server.gateway.active_call import ActiveCall
from labinfer.server.gateway.call import Call
from labinfer.server.gateway.call_requests import parse_requests
from labinfer.server.gateway.event_stream import EventStream, event
from labinfer.server.gateway.service import Model
from labinfer.text.token_offsets import TokenOffsets


async def answer(call: Call) -> Response | EventStream:
    """``POST /v1/completions``, as OpenAI's; the answers to the i-th of several prompts begin at choice ``i * n``."""
    body = await call.read(CompletionBody)
    model = call.service.model(body.model)
    parsed, requests = await parse_requests(call, model, lambda: read_completion(body, model.completion_defaults()))
    active = await ActiveCall.start(call, model, requests, parsed.stream, parsed.user)
    id, created = COMPLETION_PREFIX + call.id, int(call.service.wall_clock())
    if parsed.stream:
        return active.stream(CompletionStream(id, created, model, parsed, active).events())
    outputs = await active.outputs()

    def whole() -> Response:
        choices, given = [], list(map(without_tokens, outputs)) if parsed.prompt_alone else outputs
        for number, output in enumerate(given):
            echo = _echo(model, parsed, active, number)
            for completion in output.completions:
                index = number * parsed.sampling.n + completion.index
                choices.append(text_choice(completion, output, model.reader.tokenizer, echo, index))
        usage = total_usage(given)
        return call.json(TextCompletion(id=id, created=created, model=model.info.name, choices=choices, usage=usage))

    return await asyncio.to_thread(whole)  # thousands of log-probabilities take a while


class CompletionStream:
    """The chunks of streamed answers.

    Args:
        id, created: fields of every chunk.
    """

    def __init__(self, id: str, created: int, model: Model, parsed: GenerationInput, active: ActiveCall):
        self._id, self._created, self._model, self._parsed, self._active = id, created, model, parsed, active
        self._offsets: dict[int, TokenOffsets] = {}  # by choice

    async def events(self) -> AsyncIterator[bytes]:
        """Every chunk, encoded."""
        async for number, delta in self._active.deltas():
            choice = self._choice(number, delta)
            if choice is not None:
                yield self._send([choice])
        if self._parsed.include_usage:
            yield self._send([], is_last=True)

    def _choice(self, number: int, delta: Delta) -> TextChunkChoice | None:
        """A piece of an answer to the prompt of this number; None where there is nothing to say."""
        if self._parsed.prompt_alone:
            delta = emptied(delta)
        index = number * self._parsed.sampling.n + delta.index
        is_first = index not in self._offsets
        echo = _echo(self._model, self._parsed, self._active, number) if is_first else None
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
                self._active.opened[number].prompt_logprobs if is_first else None, self._model.reader.tokenizer
            ),
        )

    def _logprobs(self, index: int, delta: Delta, echo: Echo | None) -> TextLogprobs | None:
        tokenizer = self._model.reader.tokenizer
        offsets = self._offsets.setdefault(index, TokenOffsets(tokenizer))
        if delta.logprobs is None:
            return None
        return text_logprobs(delta.token_ids, delta.logprobs, tokenizer, echo, offsets)

    def _send(self, choices: list[TextChunkChoice], is_last: bool = False) -> bytes:
        usage = None if self._parsed.include_usage else UNSET
        if is_last or self._parsed.continuous_usage:
            usage = self._active.usage()
            if self._parsed.prompt_alone:
                usage = msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
        chunk = TextCompletionChunk(
            id=self._id, created=self._created, model=self._model.info.name, usage=usage, choices=choices
        )
        return event(chunk)


def _echo(model: Model, parsed: GenerationInput, active: ActiveCall, number: int) -> Echo | None:
    """The prompt, where it is to come back."""
    if not parsed.echo:
        return None
    opened, tokenizer = active.opened[number], model.reader.tokenizer
    token_ids = opened.request.prompt_token_ids
    prompt = parsed.prompts[number]
    text = prompt.text if isinstance(prompt, TextPrompt) else tokenizer.decode(token_ids) if tokenizer else ""
    return Echo(text, token_ids, opened.prompt_logprobs)
