"""TokenizingProcess: a helper process that tokenizes long prompts.

A call of a tokenizer library cannot be interrupted, and the library keeps the memory that it has allocated. A process can be
killed, which frees all its memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from labinfer.base.errors import PromptTooLong, UserError
from labinfer.text.helper_process import (
    HelperEnded,
    HelperProcess,
    HelperRefused,
    HelperTimeout,
    answer_messages,
)
from labinfer.text.messages import Ending
from labinfer.text.pair_text import PairText
from labinfer.text.tokenizer import Tokenizer

MODULE = "labinfer.text.tokenizing"
TOKENIZE_SECONDS = 30.0
"""Timeout in seconds of tokenizing all prompts of a request."""
MAX_BYTES = 2 << 30
"""Maximum address space of the helper process, in bytes."""


class PromptText(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt before it is tokenized: a text, or a conversation that the chat template turns into text."""

    text: str = ""
    add_special_tokens: bool = True
    """Whether ``text`` gets the special tokens that the checkpoint adds, such as BOS. A conversation has the special tokens that
    the chat template writes."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template. Like ``messages`` and ``tools``, they have the form that chat templates take."""
    ending: Ending = "before answer"
    """Where the text of the conversation ends."""

    pair: PairText | None = None
    """Query and document of a reranker, in place of a text or a conversation."""
    limit: int = 0
    """Maximum number of tokens, to which ``text`` is cut; 0 for no cut."""

    def render(self, tokenizer: Tokenizer) -> str:
        """Text of the prompt before tokenization; a conversation is rendered by the chat template."""
        if self.messages is None:
            return self.text
        return tokenizer.render_chat(self.messages, self.tools, self.template_kwargs, self.ending)

    def encode(self, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
        """Render and tokenize the prompt; for ``max_tokens`` see ``Tokenizer.encode_within``."""
        if self.pair is not None:
            return self.pair.encode(tokenizer, max_tokens)
        return self.encode_rendered(self.render(tokenizer), tokenizer, max_tokens)

    def encode_rendered(self, text: str, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
        """Tokenize ``text``, a result of ``render``."""
        if self.limit:
            return tokenizer.encode_first(text, self.limit, self.add_special_tokens)
        return tokenizer.encode_within(text, max_tokens, self.add_special_tokens and self.messages is None)


class TokenizingProcess:
    """Client of the helper process that tokenizes prompts. It starts the process for the first prompts, and again after the process
    was killed.

    Args:
        directory, response_template, chat_template: see ``Tokenizer``.
        max_tokens: maximum length of a prompt, in tokens.
        contents: ``Tokenizer.digest`` that the process must find; empty to accept any.
    """

    def __init__(
        self, directory: Path, response_template: str, max_tokens: int, chat_template: str = "", contents: str = ""
    ):
        argument = json.dumps([str(directory.resolve()), response_template, chat_template, max_tokens, contents])
        self._helper = HelperProcess(MODULE, argument, TOKENIZE_SECONDS)

    def encode(self, prompts: list[PromptText]) -> list[list[int]]:
        """Tokenize prompts. Only one thread at a time may call this method.

        Raises:
            PromptTooLong, UserError: see ``Tokenizer.encode_within``; also if tokenizing takes too much time or memory.
        """
        # JSON of Python, not of msgspec: arguments of calls may have integers of any size, and lone surrogates.
        message = json.dumps([_fields(prompt) for prompt in prompts]).encode()
        try:
            answer = msgspec.msgpack.decode(self._helper.ask(message), type=_Answer)
        except HelperTimeout:
            raise UserError(f"the prompt takes more than {TOKENIZE_SECONDS:g} s to tokenize; shorten it") from None
        except (HelperRefused, HelperEnded) as error:
            raise UserError(f"the prompt cannot be tokenized: {error}") from None
        if answer.error:
            raise (PromptTooLong if answer.is_too_long else UserError)(answer.error)
        return answer.token_ids

    def end(self) -> None:
        """Kill the process; an ``encode`` that is running in another thread is aborted."""
        self._helper.end()

    def close(self) -> None:
        """End the process if it is running. The next prompts start it again."""
        self._helper.close()


def _fields(prompt: PromptText) -> dict[str, Any]:
    """Fields of a prompt as JSON values."""
    fields = msgspec.structs.asdict(prompt)
    return fields if prompt.pair is None else fields | {"pair": msgspec.structs.asdict(prompt.pair)}


def _prompt(fields: dict[str, Any]) -> PromptText:
    """Prompt with the fields that ``_fields`` returned."""
    pair = fields.pop("pair")
    return PromptText(**fields, pair=None if pair is None else PairText(**pair))


class _Answer(msgspec.Struct, array_like=True):
    token_ids: list[list[int]] = []
    error: str = ""
    is_too_long: bool = False


# Code that runs in the helper process.


def main(argument: str) -> None:
    """Run the helper process. Each message contains the prompts of a request, and is answered with the token ids of the prompts."""
    directory, response_template, chat_template, max_tokens, contents = json.loads(argument)
    tokenizer, problem = None, ""
    try:
        tokenizer = Tokenizer(Path(directory), response_template, chat_template)
        if contents and tokenizer.digest != contents:
            problem = f"the tokenizer in {directory} has changed since it was loaded; restore the old files, or restart"
    except UserError as error:
        problem = str(error)
    answer_messages(
        lambda message: msgspec.msgpack.encode(_answer(message, tokenizer, max_tokens)),
        problem=problem,
        seconds=TOKENIZE_SECONDS,
        most_bytes=MAX_BYTES,
    )


def _answer(message: bytes, tokenizer: Tokenizer, max_tokens: int) -> _Answer:
    try:
        return _Answer([_prompt(fields).encode(tokenizer, max_tokens) for fields in json.loads(message)])
    except UserError as error:
        return _Answer(error=str(error), is_too_long=isinstance(error, PromptTooLong))


if __name__ == "__main__":
    main(sys.argv[1])
