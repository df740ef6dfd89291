"""RequestBuilder: the requests to one model's engine, built from its prompts; costly prompts wait in a queue for each caller.

A short prompt is tokenized at once, in a thread. A long one goes to a process that is ended where its caller's time is over
or its client has gone, and that ends by itself when there are no more, with all its memory. A form whose verdict is known
is checked at once; others are tried in a process, too. For both processes callers queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from labinfer.base.errors import PromptTooLong
from labinfer.engine.request import Request
from labinfer.requests.generation_input import GenerationInput
from labinfer.requests.input_processor import InputProcessor
from labinfer.requests.openai import api_errors
from labinfer.requests.prompts import TokensPrompt
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.refusals import checked
from labinfer.server.gateway.work_queue import WorkQueue
from labinfer.text.tokenizing import PromptText

IN_PLACE_BYTES = 1 << 16
"""Bodies up to so long have their prompts tokenized in a thread, within some 20 ms."""
IDLE_SECONDS = 10.0
"""Time after which a process that has no more prompts to tokenize is ended."""
FLAG = "--max-preparing-per-caller"


class RequestBuilder:
    """Makes the requests of prompts, with the tokenizer of one model.

    Args:
        max_model_len: the longest prompt in tokens. What just does not fit is refused by the engine itself.
    """

    def __init__(self, reader: InputProcessor, options: ServerOptions, max_model_len: int):
        self._reader, self._max_model_len = reader, max_model_len
        self._prompts = WorkQueue("long prompts", options.max_preparing_per_caller, FLAG)
        self._forms = WorkQueue("new forms of answers", options.max_preparing_per_caller, FLAG)
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether no long prompt, or no new form, is taken now."""
        return self._prompts.is_full or self._forms.is_full

    def read_texts(self, input: GenerationInput, num_bytes: int) -> list[PromptText] | None:
        """The texts to tokenize of a long body; None of a short one. Prompts that cannot fit are refused.

        Raises:
            ApiError: a prompt has more characters or tokens than there are in the context.
        """
        if isinstance(input.prompts[0], TokensPrompt):
            self._check_lengths(prompt.token_ids for prompt in input.prompts)
        elif num_bytes > IN_PLACE_BYTES:
            return checked(lambda: [self._reader.prompt_text(prompt) for prompt in input.prompts])
        return None

    async def build(
        self, input: GenerationInput, texts: list[PromptText] | None, caller: str, num_bytes: int
    ) -> tuple[list[Request], list[Request]]:
        """Requests, one for each prompt, and those of them whose structured-output grammar ``try_form`` has yet to check. The work is done in
        a thread or a process.

        Args:
            texts: from ``read_texts``.

        Raises:
            ApiError: one of the prompts is wrong, or too many long ones wait.
        """
        token_ids = [None] * len(input.prompts) if texts is None else await self.encode(caller, texts, num_bytes)

        def process() -> tuple[list[Request], list[Request]]:
            requests = [
                self._reader.process(None, prompt, input.sampling, token_ids=ids, **input.request_fields)
                for prompt, ids in zip(input.prompts, token_ids, strict=True)
            ]
            untried = []
            for request in requests:
                if self._reader.knows_form(request):
                    self._reader.check_form(request)
                else:
                    untried.append(request)
            return requests, untried

        requests, untried = await asyncio.to_thread(checked, process)
        self._check_lengths(request.prompt_token_ids for request in requests)
        return requests, untried

    async def encode(self, caller: str, prompts: list[PromptText], num_bytes: int) -> list[list[int]]:
        """Token ids of prompts that came in a body of so many bytes.

        Raises:
            ApiError: one of them does not become tokens, or too many wait.
        """
        if num_bytes <= IN_PLACE_BYTES:
            return await asyncio.to_thread(checked, lambda: [self._reader.encode_text(prompt) for prompt in prompts])
        process = self._reader.tokenizing
        try:
            return await self._prompts.run(caller, lambda: checked(lambda: process.encode(prompts)), process.end)
        finally:
            self._end_when_idle()

    async def try_form(self, caller: str, request: Request) -> None:
        """Try the form of a request's answer.

        Raises:
            ApiError: it is broken, or costs too much; or too many wait.
        """
        await self._forms.run(caller, lambda: checked(lambda: self._reader.check_form(request)))

    def _check_lengths(self, prompts: Iterable[list[int]]) -> None:
        longest = self._max_model_len
        for token_ids in prompts:
            if len(token_ids) > longest:
                error = PromptTooLong.for_context(longest, f"your prompt has {len(token_ids)} tokens")
                raise api_errors.too_long(str(error))

    def _end_when_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end_process)

    def _end_process(self) -> None:
        if self._prompts.is_idle:
            self._reader.tokenizing.close()
        else:
            self._end_when_idle()
