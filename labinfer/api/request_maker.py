"""RequestMaker: checked requests made of what callers of the Python API and lines of a job give."""

from __future__ import annotations

from typing import Any

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.llm_engine import LLMEngine
from labinfer.engine.request import Request
from labinfer.requests.input_processor import InputProcessor, pair_prompts
from labinfer.requests.prompts import PromptLike, parse_prompt
from labinfer.requests.runs import check_can_stream
from labinfer.worker.logits_processors.processor import check_logits_processors


class RequestMaker:
    """Makes requests for an engine, and refuses what can never run.

    Args:
        vocab_size: width of the logits.
    """

    def __init__(self, inputs: InputProcessor, engine: LLMEngine, vocab_size: int):
        self._inputs, self._engine, self._vocab_size = inputs, engine, vocab_size

    def make(self, key: Any, prompt: PromptLike, sampling: SamplingParams, **fields: Any) -> Request:
        """Tokenize and check a prompt.

        Args:
            fields: further ones of the ``Request``, such as ``cache_salt``, ``priority`` and ``user``; a dictionary's own take
                precedence.

        Raises:
            UserError: the prompt or a parameter is wrong.
        """
        request = self.prepare(key, prompt, sampling, **fields)
        self.check_processors(request)
        self._engine.check_request(request)
        return request

    def prepare(self, key: Any, prompt: PromptLike, sampling: SamplingParams, **fields: Any) -> Request:
        """The part of ``make`` that leaves the engine alone, for threads beside it; one at a time."""
        typed, extras = parse_prompt(prompt)
        request = self._inputs.process(key, typed, sampling, **fields | extras)
        self._inputs.check_form(request)
        return request

    def make_all(self, prompts: Any, params: Any, *, pooling: str = "", streams: bool = False) -> list[Request]:
        """Requests with the numbers of their prompts as keys; see ``LLM.generate``.

        Args:
            streams: refuse answers that are chosen at the end.

        Raises:
            UserError: one of them is wrong; the text says which.
        """
        requests = []
        for index, (prompt, sampling) in enumerate(pair_prompts(prompts, params)):
            try:
                requests.append(self.make(index, prompt, sampling, pooling=pooling))
            except UserError as error:
                raise UserError(f"prompt {index}: {error}") from None
            if streams:
                check_can_stream(requests[-1])
        return requests

    def check_processors(self, request: Request) -> None:
        """Raises:
        UserError: one of the request's own logits processors does not exist, or refuses its value.
        """
        check_logits_processors(request.sampling.logits_processors, request.prompt_token_ids, self._vocab_size)


def conversations(messages: Any, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts of one conversation or of a list of them.

    Args:
        fields: fields beside the messages of each.

    Raises:
        UserError: they are none.
    """
    is_one = not isinstance(messages, list) or any(isinstance(each, dict) for each in messages)
    several = [messages] if is_one else messages
    if not all(isinstance(each, list) for each in several):
        raise UserError(f"messages must be a list of messages, or a list of such lists, not {messages!r:.80}")
    return [{**fields, "messages": each} for each in several]
