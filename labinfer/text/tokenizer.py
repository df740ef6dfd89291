"""Tokenizer: a checkpoint's ``tokenizer.json``, read by tokenizers, or ``tokenizer.model``, read by SentencePiece."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from labinfer.errors import PromptTooLong, UserError, is_failure
from labinfer.text.reply_format import ReplyFormat, choose_format
from labinfer.text.reply_parser import ReplyParser
from labinfer.text.spelling import Spelling, spell
from labinfer.text.tokenizer_patterns import check_patterns
from labinfer.weights.json_file import need_plain_file, read_json

if TYPE_CHECKING:
    from labinfer.text.chat_template import ChatTemplate

MAX_SPELLINGS = 1 << 16
"""Tokens whose spelling is cached: log-probabilities spell the same few thousand again and again."""


FIRST_PART = 8
"""Characters for each token of the limit in the first part of a long text that is tried; each further one is twice as long."""
MARGIN = 2
"""Parts with more tokens than so many times the limit refuse a text. A cut may change the tokens beside it, and no others
of a common tokenizer."""

UNKNOWN = "\U0010ffff"
"""Character that no vocabulary has, but perhaps its bytes."""

MAX_PROMPT_PART = 256
"""Tokens at the end of a prompt in which a reply may have begun."""


class _Backend(Protocol):
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], shown: Collection[int] = ()) -> str: ...
    def decode_all(self, token_ids: list[int]) -> str: ...
    def name(self, token_id: int) -> str | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def added_tokens(self) -> dict[str, int]: ...
    @property
    def special_tokens(self) -> dict[str, int]: ...


class _FastBackend:
    """``tokenizer.json`` (Hugging Face tokenizers)."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as FastTokenizer

        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the Rust library raises plain Exception
            raise UserError(f"{path} is not a valid tokenizer: {str(error).splitlines()[0]:.120}") from None
        try:
            for component in (self._tokenizer.normalizer, self._tokenizer.pre_tokenizer):
                check_patterns(component)
        except ValueError as error:
            raise UserError(f"{path} is not supported: {error}") from None
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self._hidden = frozenset(self.special_tokens.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Unlike encode, this releases Python's lock and computes no offsets.
        with _panics_as_errors(text):
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: list[int], shown: Collection[int] = ()) -> str:
        hidden = self._hidden.difference(shown) if shown else self._hidden
        return self.decode_all([token for token in token_ids if token not in hidden])

    def decode_all(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def name(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()


@contextmanager
def _panics_as_errors(text: str) -> Iterator[None]:
    """Make a ``UserError`` of a panic of the library."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise UserError(
            f"the tokenizer fails on this text of {len(text)} characters, {text[:40]!r}: {str(error)!r:.100}"
        ) from None


GUARD = "\ue000"
"""Character of no vocabulary: behind it SentencePiece neither puts nor drops a space at the beginning of a text."""


class _SentencePieceBackend:
    """``tokenizer.model`` (SentencePiece), with the beginning-of-sequence token Llama expects.

    SentencePiece itself reads a text as letters throughout. Here its control symbols, and tokens that the checkpoint adds, are
    found in the text, as chat templates write them; what follows one begins with no space of SentencePiece's own, unless
    the checkpoint asks for its ``legacy`` way.
    """

    def __init__(self, path: Path):
        from sentencepiece import SentencePieceProcessor

        config, self.special_tokens, self.added_tokens = _read_optional(path.with_name("tokenizer_config.json")), {}, {}
        try:
            self._processor = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path} is not a valid SentencePiece model: {str(error).splitlines()[0]:.120}") from None
        self._guard, self._is_legacy = self._processor.encode(GUARD), bool(config.get("legacy"))
        for token_id in range(self._processor.get_piece_size()):
            if self._processor.is_control(token_id) or self._processor.is_unknown(token_id):
                self.special_tokens[self._processor.id_to_piece(token_id)] = token_id
        for content, token_id, is_special in _added_tokens(path.parent, config):
            (self.special_tokens if is_special else self.added_tokens)[content] = token_id
        self.added_tokens |= self.special_tokens
        self._names = {token_id: content for content, token_id in self.added_tokens.items()}
        self._hidden = frozenset(self.special_tokens.values())
        longest_first = sorted(filter(None, self.added_tokens), key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        bos = self._processor.bos_id()
        ids = [bos] * (add_special_tokens and bos >= 0)
        for index, part in enumerate(self._marks.split(text)):
            if index % 2:
                ids.append(self.added_tokens[part])
            elif index and (part.startswith(" ") or not self._is_legacy):
                ids += self._processor.encode(GUARD + part)[len(self._guard) :]
            else:
                ids += self._processor.encode(part)
        return ids

    def decode(self, token_ids: list[int], shown: Collection[int] = ()) -> str:
        return self._join([token for token in token_ids if token not in self._hidden or token in shown])

    def decode_all(self, token_ids: list[int]) -> str:
        return self._join(token_ids)

    def _join(self, token_ids: list[int]) -> str:
        decode, text, run, guarded = self._processor.decode, "", [], self._processor.decode(self._guard)
        for token_id in token_ids:
            if token_id in self._names:
                text, run = text + decode(run).removeprefix(guarded) + self._names[token_id], list(self._guard)
            elif token_id < self._processor.get_piece_size():
                run.append(token_id)
        return text + decode(run).removeprefix(guarded)

    def name(self, token_id: int) -> str | None:
        if token_id in self._names:
            return self._names[token_id]
        return self._processor.id_to_piece(token_id) if token_id < self._processor.get_piece_size() else None

    @property
    def vocab_size(self) -> int:
        return max([self._processor.get_piece_size(), *(token_id + 1 for token_id in self._names)])


def _added_tokens(directory: Path, config: dict[str, Any]) -> Iterator[tuple[str, int, bool]]:
    """Text, id and whether it is special of each token that a checkpoint adds to SentencePiece's."""
    try:
        for content, token_id in _read_optional(directory / "added_tokens.json").items():
            yield content, int(token_id), False
        for token_id, token in (config.get("added_tokens_decoder") or {}).items():
            yield token["content"], int(token_id), bool(token.get("special"))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{directory} has added tokens without text or id in added_tokens.json or tokenizer_config.json"
        ) from None


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


class Tokenizer:
    """Text ↔ token ids of a checkpoint.

    Args:
        response_template: how replies are read; see ``choose_format``.
        chat_template: file that takes the place of the checkpoint's chat templates; empty for none.

    Raises:
        UserError: the directory has no tokenizer, or a broken one; one of the templates cannot be used.
    """

    def __init__(self, directory: Path, response_template: str = "", chat_template: str = ""):
        self._directory = directory
        self._backend: _Backend
        for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja"):
            need_plain_file(directory / name)
        if (directory / "tokenizer.json").exists():
            self._backend = _FastBackend(directory / "tokenizer.json")
        elif (directory / "tokenizer.model").exists():
            self._backend = _SentencePieceBackend(directory / "tokenizer.model")
        else:
            raise UserError(
                f"{directory} has no tokenizer.json and no tokenizer.model; give --tokenizer DIR, or prompts as token ids"
            )
        self._template, self._tool_template, self.reply_format = _load_templates(
            directory, response_template, chat_template
        )
        """Format by which replies are read; None where they are content and nothing else."""
        self._anchors = frozenset(
            token_id
            for text, token_id in self._backend.special_tokens.items()
            if self.reply_format is not None and self.reply_format.mentions(text)
        )
        self._spell = lru_cache(MAX_SPELLINGS)(self._spell_anew)

    @property
    def vocab_size(self) -> int:
        return self._backend.vocab_size

    @property
    def json_file(self) -> Path | None:
        """Path of the ``tokenizer.json`` that this tokenizer was read from; None for SentencePiece's."""
        return self._directory / "tokenizer.json" if isinstance(self._backend, _FastBackend) else None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that were added to the learned vocabulary, special ones included, by their text."""
        return self._backend.added_tokens

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, bytes of UTF-8 counted as such; no bound where the tokenizer makes one token of any
        number of unknown characters, or drops some."""
        longest = max((len(self._backend.name(token_id) or "") for token_id in range(self.vocab_size)), default=1)
        count = 4 * longest
        for character in (UNKNOWN, " "):
            if len(self.encode(character * count, add_special_tokens=False)) * longest < count:
                return sys.maxsize
        return longest

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            UserError: the text holds lone surrogates, as a broken command line or JSON may, or makes the library fail.
        """
        try:
            return self._backend.encode(text, add_special_tokens)
        except (TypeError, UnicodeError):
            raise UserError(f"the text is not valid Unicode: {text!r:.60}") from None

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raises:
        PromptTooLong: the text has more characters than so many tokens can have.
        """
        if FIRST_PART * max_tokens < len(text) > self.longest_token * max_tokens:
            raise PromptTooLong(
                f"This model's maximum context length is {max_tokens} tokens. However, your prompt has {len(text)} "
                f"characters, and the model's tokens have at most {self.longest_token} each. Please reduce the length of "
                "the prompt."
            )

    def encode_within(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, of which at most ``max_tokens`` can be used. The work is bounded by those, and not by the text.

        Raises:
            PromptTooLong: the text has far more tokens. One that has a few more passes.
            UserError: see ``encode``.
        """
        self.check_length(text, max_tokens)
        size = FIRST_PART * max_tokens
        while size < len(text):
            count = len(self.encode(text[:size], add_special_tokens))
            if count > MARGIN * max_tokens:
                raise PromptTooLong(
                    f"This model's maximum context length is {max_tokens} tokens. However, the first {size} characters of "
                    f"your prompt are {count} tokens already. Please reduce the length of the prompt."
                )
            size *= 2
        return self.encode(text, add_special_tokens)

    def decode(self, token_ids: list[int]) -> str:
        """Text of the ids without special tokens; incomplete UTF-8 is shown as U+FFFD."""
        return self._backend.decode(token_ids)

    def decode_reply(self, token_ids: list[int]) -> str:
        """Text of a chat reply: special tokens by which its parts are told apart are a part of it."""
        return self._backend.decode(token_ids, self._anchors)

    def reply_parser(self, prompt_token_ids: list[int], tools: list[dict], parallel: bool = True) -> ReplyParser | None:
        """A parser of a reply to this prompt; None where replies are content and nothing else.

        Args:
            tools: those that were offered, in the form of chat templates.
            parallel: whether a reply may have several calls.
        """
        if self.reply_format is None:
            return None
        prompt = self._backend.decode_all(prompt_token_ids[-MAX_PROMPT_PART:])
        return self.reply_format.parser(prompt, tools, parallel)

    def spell(self, token_id: int) -> Spelling:
        """Text and bytes of a token alone."""
        return self._spell(token_id)

    def _spell_anew(self, token_id: int) -> Spelling:
        return spell(token_id, self._backend.decode([token_id]), self._backend.name(token_id))

    def encode_chat(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation up to the beginning of the assistant's answer; see ``render_chat``."""
        return self.encode(self.render_chat(messages, tools, template_kwargs), add_special_tokens=False)

    def render_chat(
        self, messages: list[dict], tools: list[dict] | None = None, template_kwargs: dict[str, Any] | None = None
    ) -> str:
        """Text of a conversation up to the beginning of the assistant's answer; see ``ChatTemplate.render``.

        Raises:
            UserError: there is no chat template, or it refuses these messages, tools or variables.
        """
        template = self._need_template(tools)
        if self.reply_format is not None and (key := self.reply_format.reasoning_key) != "reasoning_content":
            messages = [
                message | {key: message["reasoning_content"]} if "reasoning_content" in message else message
                for message in messages
            ]
        return template.render(messages, tools, template_kwargs)

    def template_reads(self, name: str, tools: list[dict] | None = None) -> bool:
        """Whether the chat template reads a variable of this name.

        Raises:
            UserError: there is no chat template.
        """
        return name in self._need_template(tools).variables

    @property
    def may_think(self) -> bool:
        """Whether the chat template knows the thoughts of the reply format: the model was taught to think."""
        if self.reply_format is None or self.reply_format.thought is None or self._template is None:
            return False
        thought = self.reply_format.thought
        return any(thought.open in t.source or thought.close in t.source for t in self._templates)

    @property
    def _templates(self) -> list[ChatTemplate]:
        return [template for template in (self._template, self._tool_template) if template is not None]

    def _need_template(self, tools: list[dict] | None) -> ChatTemplate:
        if self._template is None:
            raise UserError(f"{self._directory} has no chat template; send a prompt instead of messages")
        return (self._tool_template if tools else None) or self._template


def _load_templates(
    directory: Path, response_template: str, chat_template: str
) -> tuple[ChatTemplate | None, ChatTemplate | None, ReplyFormat | None]:
    """The chat template, another for conversations with tools where the checkpoint has one, and the format of replies."""
    config = _read_optional(directory / "tokenizer_config.json")
    source = config.get("chat_template")
    if chat_template:
        need_plain_file(Path(chat_template))
        source = _read_template(Path(chat_template), "--chat-template ")
    elif (path := directory / "chat_template.jinja").exists():
        source = _read_template(path)
    elif (directory / "chat_template.json").exists():
        source = read_json(directory / "chat_template.json").get("chat_template")
    named = {"default": source}
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
    sources = [named.get(name) for name in ("default", "tool_use")]
    if not isinstance(sources[0], str):
        choose_format(response_template, None, "")  # refuses one that cannot be
        return None, None, None
    from labinfer.text.chat_template import ChatTemplate  # here, so that Jinja is imported only where it is needed

    tokens = {
        key: str(value.get("content", "") if isinstance(value, dict) else value)
        for key, value in config.items()
        if key in ("bos_token", "eos_token", "pad_token", "unk_token") and value
    }
    default, with_tools = (ChatTemplate(source, tokens) if isinstance(source, str) else None for source in sources)
    whole = "\n".join(source for source in sources if isinstance(source, str))
    return default, with_tools, choose_format(response_template, config.get("response_template"), whole)


def _read_template(path: Path, flag: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UserError(f"{flag}{path} cannot be read: {error}") from None
