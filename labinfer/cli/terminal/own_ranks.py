"""OwnRanks: chat backend for a model that is loaded on the ranks of this launch."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from labinfer.base.errors import Interrupted, UserError
from labinfer.base.sampling_params import MAX_SEED, SamplingParams
from labinfer.cli.terminal.backend import ChatReply, MessageRefused, ReasoningPiece
from labinfer.engine.request import FinishReason
from labinfer.requests.outputs import RequestState
from labinfer.requests.prompts import ChatPrompt
from labinfer.requests.recommended_sampling import recommended_sampling
from labinfer.text.reply_parts import Reasoning

if TYPE_CHECKING:
    from labinfer.api.llm import LLM
    from labinfer.engine.request import Request

TEMPERATURE = 0.7
"""Sampling temperature of a chat if the checkpoint recommends sampling but no temperature."""


class OwnRanks:
    """Chat backend on rank 0, while the other ranks run ``LLM.follow``. See ``Backend``.

    Args:
        check: called between steps, when all ranks are in a consistent state; may raise ``Interrupted``.
    """

    def __init__(self, llm: LLM, check: Callable[[], None]):
        self._llm, self._check = llm, check
        self.model = llm.options.model.model
        recommended = recommended_sampling(llm.directory)
        self._defaults: dict[str, Any] = {"max_tokens": llm.spec.max_model_len}
        self._defaults |= {"temperature": 0.0} if recommended is None else {"temperature": TEMPERATURE} | recommended

    def describe(self) -> str:
        size = self._llm.group.size
        return f"{self.model} on {size} rank{'s' * (size > 1)}"

    def stream(self, messages: list[dict[str, str]], settings: dict[str, Any], answer: ChatReply) -> Iterator[str]:
        try:
            fresh = {"seed": secrets.randbelow(MAX_SEED)}
            request = self._llm.make_request(
                0, ChatPrompt(messages), SamplingParams(**self._defaults | fresh | settings)
            )
        except UserError as error:
            raise MessageRefused(str(error)) from None
        answer.prompt_tokens = len(request.prompt_token_ids)
        try:
            yield from self._run(request, answer)
        except (GeneratorExit, Interrupted):  # raised between steps, when all ranks are consistent
            self._llm.driver.drain()
            raise

    def _run(self, request: Request, answer: ChatReply) -> Iterator[str]:
        driver, tokenizer = self._llm.driver, self._llm.tokenizer
        parser = tokenizer.reply_parser(request.prompt_token_ids, [])
        state = RequestState(request, tokenizer, streams=True, clock=self._llm.clock)
        for news in driver.run([(state, request)], self._check):  # also completes steps in flight after a stop string
            for _, update in news:
                if state.add(update):
                    driver.abort(state, reason=FinishReason.STOP)
                answer.num_tokens, answer.cached_tokens = state.num_output_tokens, state.num_cached_tokens
                delta = state.take_delta(update.index)
                answer.finish_reason = delta.finish_reason or ""
                if parser is None:
                    yield from filter(None, [delta.text])
                    continue
                events = parser.feed(delta.text) + (parser.finish() if delta.finish_reason else [])
                yield from (ReasoningPiece(part.text) if isinstance(part, Reasoning) else part.text for part in events)
