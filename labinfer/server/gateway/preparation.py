"""Preparation: prompts and forms of answers of one model made ready, without that anybody else has to wait for the costly ones.

A short prompt is tokenized at once, in a thread. A long one goes to a process that is ended where its caller's time is over
or its client has gone, and that ends by itself when there are no more, with all its memory. A form whose verdict is known
is checked at once; others are tried in a process, too. For both processes callers queue.
"""

from __future__ import annotations

import asyncio

from labinfer.engine.request import Request
from labinfer.requests.input_processor import InputProcessor
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.refusals import checked
from labinfer.server.gateway.work_queue import WorkQueue
from labinfer.text.tokenizing import PromptText

IN_PLACE_BYTES = 1 << 16
"""Bodies up to so long have their prompts tokenized in a thread, within some 20 ms."""
IDLE_SECONDS = 10.0
"""Time after which a process that has no more prompts to tokenize is ended."""
FLAG = "--max-preparing-per-caller"


class Preparation:
    """Makes requests ready, with the tokenizer of one model."""

    def __init__(self, reader: InputProcessor, options: ServerOptions):
        self._reader = reader
        self._prompts = WorkQueue("long prompts", options.max_preparing_per_caller, FLAG)
        self._forms = WorkQueue("new forms of answers", options.max_preparing_per_caller, FLAG)
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether no long prompt, or no new form, is taken now."""
        return self._prompts.is_full or self._forms.is_full

    async def encode(self, caller: str, prompts: list[PromptText], num_bytes: int) -> list[list[int]]:
        """Token ids of prompts that came in a body of so many bytes.

        Raises:
            ApiError: one of them does not become tokens.
            ApiError: too many wait.
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
            ApiError: it is broken, or costs too much.
            ApiError: too many wait.
        """
        await self._forms.run(caller, lambda: checked(lambda: self._reader.check_form(request)))

    def _end_when_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end_process)

    def _end_process(self) -> None:
        if self._prompts.is_idle:
            self._reader.tokenizing.close()
        else:
            self._end_when_idle()
