"""CallRequests: requests to the engine, made of a call's prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from labinfer.base.errors import PromptTooLong
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import Request
from labinfer.requests.generation_input import GenerationInput
from labinfer.requests.openai import api_errors
from labinfer.requests.prompts import ChatPrompt, Prompt, TokensPrompt
from labinfer.server.gateway.call import Call
from labinfer.server.gateway.preparation import IN_PLACE_BYTES
from labinfer.server.gateway.refusals import checked
from labinfer.server.gateway.service import Model


async def parse_requests(
    call: Call, model: Model, parse: Callable[[], GenerationInput]
) -> tuple[GenerationInput, CallRequests]:
    """The request of a body that was read, and the maker of its requests to the engine.

    Raises:
        ApiError: ``parse`` raises a ``UserError``, a prompt has more characters than there are in the context, or the answers
            cannot be streamed.
    """

    def work() -> tuple[GenerationInput, CallRequests]:
        parsed = checked(parse)
        if parsed.stream and not parsed.sampling.can_stream:
            raise api_errors.bad_request("best_of and num_beams cannot stream: the best are known at the end", "stream")
        for text in parsed.warnings:
            call.warn(text)
        requests = CallRequests(
            call,
            model,
            parsed.prompts,
            parsed.sampling,
            user=parsed.user,
            cache_salt=parsed.cache_salt,
            priority=parsed.priority,
            form_field=parsed.form_field,
            max_tokens_field=parsed.max_tokens_field,
        )
        return parsed, requests

    return await call.compute(work)


async def count_prompt_tokens(call: Call, model: Model, parse: Callable[[], ChatPrompt]) -> int:
    """Number of prompt tokens of a chat body, including those that the chat template adds.

    Raises:
        ApiError: ``parse`` raises a ``UserError``, or the conversation does not become tokens.
        ApiError: too many long ones wait.
    """
    text = await call.compute(lambda: checked(lambda: model.reader.prompt_text(parse())))
    (token_ids,) = await model.preparation.encode(call.queue_name, [text], call.num_body_bytes)
    return len(token_ids)


class CallRequests:
    """Makes requests of prompts, with their caller's part of the KV cache. Prompts that cannot fit are refused at once.

    Args:
        prompts: one or more, all of one kind.
        user, cache_salt: as the body has them; all others see ``Request``.

    Raises:
        ApiError: a prompt has more characters than there are in the context.
    """

    def __init__(
        self,
        call: Call,
        model: Model,
        prompts: list[Prompt],
        sampling: SamplingParams,
        *,
        user: str = "",
        cache_salt: str = "",
        priority: int = 0,
        pooling: str = "",
        form_field: str = "structured_outputs",
        max_tokens_field: str = "",
    ):
        self._call, self._model, self._prompts, self._sampling = call, model, prompts, sampling
        self._fields = {
            "user": call.caller.user_for(user),
            "cache_salt": call.caller.salt_for(cache_salt),
            "priority": priority + call.priority,
            "pooling": pooling,
            "form_field": form_field,
            "max_tokens_field": max_tokens_field,
        }
        is_long = call.num_body_bytes > IN_PLACE_BYTES and not isinstance(prompts[0], TokensPrompt)
        self._texts = checked(lambda: [model.reader.prompt_text(prompt) for prompt in prompts]) if is_long else None
        if isinstance(prompts[0], TokensPrompt):
            self._check_lengths([prompt.token_ids for prompt in prompts])

    async def make(self) -> list[Request]:
        """The requests, one for each prompt; nothing of this is done on the event loop.

        Raises:
            ApiError: what is wrong with one of them.
            ApiError: too many long prompts, or new forms of answers, wait.
        """
        reader, preparation = self._model.reader, self._model.preparation
        caller, token_ids = self._call.queue_name, [None] * len(self._prompts)
        if self._texts is not None:
            token_ids = await preparation.encode(caller, self._texts, self._call.num_body_bytes)

        def process() -> tuple[list[Request], list[Request]]:
            """All requests, and those whose forms have to be tried yet."""
            requests = [
                reader.process(None, prompt, self._sampling, token_ids=ids, **self._fields)
                for prompt, ids in zip(self._prompts, token_ids, strict=True)
            ]
            untried = []
            for request in requests:
                if reader.knows_form(request):
                    reader.check_form(request)
                else:
                    untried.append(request)
            return requests, untried

        requests, untried = await asyncio.to_thread(checked, process)
        self._check_lengths([request.prompt_token_ids for request in requests])
        self._call.free_body()
        for request in untried:
            await preparation.try_form(caller, request)
        return requests

    def _check_lengths(self, prompts: list[list[int]]) -> None:
        """Refuse what is far too long, which is not to burden the engine. That says itself what just does not fit."""
        longest = self._model.info.max_model_len
        for token_ids in prompts:
            if len(token_ids) > longest:
                error = PromptTooLong.for_context(longest, f"your prompt has {len(token_ids)} tokens")
                raise api_errors.too_long(str(error))
