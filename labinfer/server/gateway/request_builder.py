"""RequestBuilder: builds engine requests from the prompts of one model; every caller has a queue for costly prompts.

A short prompt is tokenized in a thread. A long prompt goes to a helper process, which is killed on a timeout or a client
disconnect, and exits when idle to free its memory. A structured-output grammar that was checked before is accepted or refused at
once; a new grammar is compiled in another helper process. Each helper process has a queue that is fair to all callers.
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
"""Maximum length, in bytes, of a body whose prompts are tokenized in a thread of the gateway, which takes about 20 ms."""
IDLE_SECONDS = 10.0
"""Idle seconds after which the tokenizer process is ended."""
FLAG = "--max-preparing-per-caller"


class RequestBuilder:
    """Builds engine requests with the tokenizer of one model.

    Args:
        max_model_len: maximum prompt length in tokens. (The engine refuses prompts that leave no room for an answer.)
    """

    def __init__(self, reader: InputProcessor, options: ServerOptions, max_model_len: int):
        self._reader, self._max_model_len = reader, max_model_len
        self._prompts = WorkQueue("long prompts", options.max_preparing_per_caller, FLAG)
        self._forms = WorkQueue("new structured-output schemas", options.max_preparing_per_caller, FLAG)
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether a new long prompt or a new structured-output grammar would be rejected, because the queue for it is full."""
        return self._prompts.is_full or self._forms.is_full

    def read_texts(self, input: GenerationInput, num_bytes: int) -> list[PromptText] | None:
        """Prompt texts of a long body (``num_bytes`` of JSON), which the helper process will tokenize; None for a short body.

        Raises:
            ApiError: a prompt has more characters or tokens than fit into the context.
        """
        if isinstance(input.prompts[0], TokensPrompt):
            self._check_lengths(prompt.token_ids for prompt in input.prompts)
        elif num_bytes > IN_PLACE_BYTES:
            return checked(lambda: [self._reader.prompt_text(prompt) for prompt in input.prompts])
        return None

    async def build(
        self, input: GenerationInput, texts: list[PromptText] | None, caller: str, num_bytes: int
    ) -> tuple[list[Request], list[Request]]:
        """Build one engine request per prompt. Returns all engine requests, and those whose structured-output grammar
        ``try_grammar`` must still check.

        Args:
            texts: result of ``read_texts``.

        Raises:
            ApiError: a prompt is invalid, or too many long prompts are queued.
        """
        token_ids = [None] * len(input.prompts) if texts is None else await self.encode(caller, texts, num_bytes)

        def process() -> tuple[list[Request], list[Request]]:
            requests = [
                self._reader.process(None, prompt, input.sampling, token_ids=ids, **input.request_fields)
                for prompt, ids in zip(input.prompts, token_ids, strict=True)
            ]
            untried = []
            for request in requests:
                if self._reader.is_grammar_known(request):
                    self._reader.check_grammar(request)
                else:
                    untried.append(request)
            return requests, untried

        requests, untried = await asyncio.to_thread(checked, process)
        self._check_lengths(request.prompt_token_ids for request in requests)
        return requests, untried

    async def encode(self, caller: str, prompts: list[PromptText], num_bytes: int) -> list[list[int]]:
        """Tokenize the prompts of a body of ``num_bytes`` bytes; for a long body, the helper process does. Returns the token ids of
        each prompt.

        Raises:
            ApiError: a prompt cannot be tokenized, or too many prompts are queued.
        """
        if num_bytes <= IN_PLACE_BYTES:
            return await asyncio.to_thread(checked, lambda: [self._reader.encode_text(prompt) for prompt in prompts])
        process = self._reader.tokenizing
        try:
            return await self._prompts.run(caller, lambda: checked(lambda: process.encode(prompts)), process.end)
        finally:
            self._end_when_idle()

    async def try_grammar(self, caller: str, request: Request) -> None:
        """Check the structured-output grammar of ``request`` in a helper process, which is killed if the check takes too long.

        Raises:
            ApiError: the grammar is invalid or too costly, or too many grammars are queued.
        """
        await self._forms.run(caller, lambda: checked(lambda: self._reader.check_grammar(request)))

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
