"""Tokenizer: converts text to token ids and back, by ``tokenizer.json`` (tokenizers library), ``tokenizer.model`` (SentencePiece) or a GGUF file."""

from __future__ import annotations

import sys
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labinfer.base.errors import PromptTooLong, UserError
from labinfer.text.gguf_tokenizer import read_gguf_tokenizer
from labinfer.text.messages import Ending
from labinfer.text.reply_format import ReplyFormat, choose_format
from labinfer.text.reply_parser import ReplyParser
from labinfer.text.token_decoder import TokenDecoder
from labinfer.text.token_text import TokenText, make_token_text
from labinfer.text.tokenizer_backends import FastBackend, SentencePieceBackend, TokenizerBackend
from labinfer.weights.gguf.file import is_gguf
from labinfer.weights.identity import changed_path, combined_digest, identify, setting_files, template_files
from labinfer.weights.json_file import need_plain_file, read_json, read_optional

if TYPE_CHECKING:
    from labinfer.text.chat_template import ChatTemplate

MAX_CACHED_TEXTS = 1 << 16
"""Maximum number of tokens whose `TokenText` is cached: log-probabilities mostly need a few thousand frequent tokens."""

PREFIX_CHARACTERS = 8
"""A long text is tokenized in prefixes: first a prefix with this many characters per allowed token, then prefixes of twice the
length each, until there are too many tokens or the prefix is the whole text."""
MAX_EXCESS = 2
"""A text is refused if a prefix of it has more than this multiple of the allowed tokens. In common tokenizers, cutting a text
changes only tokens next to the cut."""

UNKNOWN = "\U0010ffff"
"""Character that vocabularies do not have, or have only as bytes."""

MAX_PROMPT_PART = 256
"""Number of tokens at the end of a prompt that are searched for the beginning of the reply."""


class Tokenizer:
    """The tokenizer of a checkpoint, with its chat template and the format of its replies.

    Args:
        directory: directory of the checkpoint, or path of a GGUF file.
        response_template: format of chat replies; see ``choose_format``.
        chat_template: file that replaces the checkpoint's chat templates; empty for none.

    Raises:
        UserError: the directory has no tokenizer, or an invalid one; or a template cannot be used.
    """

    def __init__(self, directory: Path, response_template: str = "", chat_template: str = ""):
        self._directory = directory
        self._find_files = lambda: setting_files(directory) | template_files(chat_template, response_template)
        self.identity = identify(self._find_files())
        """Identity (digests) of the files from which the tokenizer was read."""
        self._backend, config = self._open(directory)
        self._template, self._tool_template, self.reply_format = _load_templates(
            directory, config, response_template, chat_template, named_tokens=self._backend.named_tokens
        )
        """Format by which replies are parsed; None if replies have neither reasoning nor tool calls."""
        self._special_ids = frozenset(self._backend.special_tokens.values())
        self._delimiters = frozenset(
            token_id
            for text, token_id in self._backend.special_tokens.items()
            if self.reply_format is not None and self.reply_format.mentions(text)
        )
        self._cached_text = lru_cache(MAX_CACHED_TEXTS)(self._make_token_text)
        self.check_unchanged()

    @property
    def digest(self) -> str:
        """Digest of the contents of the tokenizer's files."""
        return combined_digest(self.identity)

    def check_unchanged(self) -> None:
        """Check that the tokenizer's files have not changed since they were read. Call it before another process reads
        them.

        Raises:
            UserError: a file has changed, is new, or is gone.
        """
        if path := changed_path(self.identity, self._find_files()):
            raise UserError(f"{path} has changed since it was loaded; restore the old files, or restart")

    @staticmethod
    def _open(directory: Path) -> tuple[TokenizerBackend, dict[str, Any]]:
        """Open a tokenizer. Returns its backend, and the values of ``tokenizer_config.json``."""
        if is_gguf(directory):
            return read_gguf_tokenizer(directory)
        backend: TokenizerBackend
        for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja"):
            need_plain_file(directory / name)
        if (directory / "tokenizer.json").exists():
            backend = FastBackend(directory / "tokenizer.json")
        elif (directory / "tokenizer.model").exists():
            backend = SentencePieceBackend(directory / "tokenizer.model")
        else:
            raise UserError(
                f"{directory} has no tokenizer.json and no tokenizer.model; give --tokenizer DIR, or prompts as token ids"
            )
        return backend, read_optional(directory / "tokenizer_config.json")

    @property
    def vocab_size(self) -> int:
        return self._backend.vocab_size

    @property
    def json_file(self) -> Path | None:
        """Path of the ``tokenizer.json`` or GGUF file from which this tokenizer was read; None for a SentencePiece
        model."""
        if not isinstance(self._backend, FastBackend):
            return None
        return self._directory if is_gguf(self._directory) else self._directory / "tokenizer.json"

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that were added to the learned vocabulary, by text. Special tokens are among them."""
        return self._backend.added_tokens

    @cached_property
    def longest_token(self) -> int:
        """Length of the longest vocabulary entry, in characters (in bytes for byte-level vocabularies). ``sys.maxsize`` if the
        tokenizer may drop characters, or make one token of any number of unknown characters."""
        longest = max((len(self._backend.name(token_id) or "") for token_id in range(self.vocab_size)), default=1)
        count = 4 * longest
        for character in (UNKNOWN, " "):
            if len(self.encode(character * count, add_special_tokens=False)) * longest < count:
                return sys.maxsize
        return longest

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Convert a text to token ids.

        Raises:
            UserError: the text contains lone surrogates (from a broken command line or JSON), or the library fails on
                it.
        """
        try:
            return self._backend.encode(text, add_special_tokens)
        except (TypeError, UnicodeError):
            raise UserError(f"the text is not valid Unicode: {text!r:.60}") from None

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Convert a pair of texts to token ids, for models that read two texts together; see ``encode``."""
        try:
            return self._backend.encode_pair(first, second)
        except (TypeError, UnicodeError):
            raise UserError(f"the texts are not valid Unicode: {first!r:.60}, {second!r:.60}") from None

    def check_length(self, text: str, max_tokens: int) -> None:
        """Check by its number of characters that a text can have ``max_tokens`` tokens or fewer.

        Raises:
            PromptTooLong: the text has more characters than ``max_tokens`` tokens can have.
        """
        if PREFIX_CHARACTERS * max_tokens < len(text) > self.longest_token * max_tokens:
            problem = f"{len(text)} characters, and the model's tokens have at most {self.longest_token} each"
            raise PromptTooLong.for_context(max_tokens, f"your prompt has {problem}")

    def encode_within(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Convert a text to token ids for a caller that can use at most ``max_tokens`` of them. The time is bounded by
        ``max_tokens``, however long the text is.

        Raises:
            PromptTooLong: the text has far more than ``max_tokens`` tokens. (If it has only a few more, all are returned.)
            UserError: see ``encode``.
        """
        self.check_length(text, max_tokens)
        size = PREFIX_CHARACTERS * max_tokens
        while size < len(text):
            count = len(self.encode(text[:size], add_special_tokens))
            if count > MAX_EXCESS * max_tokens:
                raise PromptTooLong.for_context(
                    max_tokens, f"the first {size} characters of your prompt are {count} tokens already"
                )
            size *= 2
        return self.encode(text, add_special_tokens)

    def encode_first(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Convert the beginning of a text to at most ``max_tokens`` token ids. The text is cut, never the special tokens around
        it, as models read the last of them. The time is bounded by ``max_tokens``.

        Raises:
            UserError: the special tokens leave no room for text; see also ``encode``.
        """
        size = PREFIX_CHARACTERS * max_tokens
        own = self.encode(text[:size], add_special_tokens=False)
        # The last tokens of a prefix may differ from those of the whole text: twice as many are encoded as are used.
        while size < len(text) and len(own) < 2 * max_tokens + 64:
            size *= 2
            own = self.encode(text[:size], add_special_tokens=False)
        whole = self.encode(text[:size], add_special_tokens)
        count = len(whole) - len(own)
        if count >= max_tokens:
            raise UserError(
                f"truncate_prompt_tokens {max_tokens} leaves no room for text: the tokenizer adds {count} special tokens; choose more"
            )
        begin = next((at for at in range(count + 1) if whole[at : at + len(own)] == own), None)
        if begin is None:
            raise UserError(
                "truncate_prompt_tokens: this tokenizer changes a text that it adds special tokens to; leave it out"
            )
        return whole[:begin] + own[: max_tokens - count] + whole[begin + len(own) :]

    def decode(self, token_ids: list[int]) -> str:
        """Convert token ids to text without special tokens. Each byte that cannot be decoded becomes one U+FFFD, see
        ``Utf8Decoder``."""
        return self._backend.decoder().decode(token_ids)

    def further_decoder(self, with_special: bool = False) -> TokenDecoder:
        """Make a decoder for tokens that continue a text. The decoder keeps SentencePiece's leading space, which ``decode``
        removes.

        Args:
            with_special: whether the text includes special tokens.
        """
        return self._backend.decoder(self._special_ids if with_special else (), inside=True)

    def reply_decoder(self, with_special: bool = False, inside: bool = False) -> TokenDecoder:
        """Make a decoder for a chat reply. Its text includes the special tokens that delimit reasoning and tool calls.

        Args:
            with_special: whether the text includes all other special tokens, too.
            inside: whether the reply continues the last message, as in ``further_decoder``.
        """
        return self._backend.decoder(self._special_ids if with_special else self._delimiters, inside)

    def reply_parser(self, prompt_token_ids: list[int], tools: list[dict], parallel: bool = True) -> ReplyParser | None:
        """Make a parser for the reply to a prompt; None if replies have neither reasoning nor tool calls.

        Args:
            tools: offered tools, in the form of chat templates.
            parallel: whether a reply may have several tool calls.
        """
        if self.reply_format is None:
            return None
        prompt = self._backend.decoder(self._special_ids).decode(prompt_token_ids[-MAX_PROMPT_PART:])
        return self.reply_format.parser(prompt, tools, parallel)

    def token_text(self, token_id: int) -> TokenText:
        """Text and bytes of a token that is not the first of a text."""
        return self._cached_text(token_id)

    def _make_token_text(self, token_id: int) -> TokenText:
        text, name = self.further_decoder().decode([token_id]), self._backend.name(token_id)
        return make_token_text(token_id, text, name, self._backend.token_bytes(token_id))

    def encode_chat(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Render a conversation up to the start of the assistant's answer, and convert it to token ids; for the arguments see
        ``render_chat``."""
        return self.encode(self.render_chat(messages, tools, template_kwargs), add_special_tokens=False)

    def render_chat(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        ending: Ending = "before answer",
    ) -> str:
        """Render a conversation to text; see ``ChatTemplate.render``.

        Raises:
            UserError: there is no chat template, or it refuses these messages, tools or variables.
        """
        template = self._need_template(tools)
        if self.reply_format is not None and (key := self.reply_format.reasoning_key) != "reasoning_content":
            messages = [
                message | {key: message["reasoning_content"]} if "reasoning_content" in message else message
                for message in messages
            ]
        return template.render(messages, tools, template_kwargs, ending)

    def template_reads(self, name: str, tools: list[dict] | None = None) -> bool:
        """Whether the chat template reads a variable called ``name``.

        Raises:
            UserError: there is no chat template.
        """
        return name in self._need_template(tools).variables

    def template_mentions(self, *texts: str) -> bool:
        """Whether there is a chat template, and its source contains all of ``texts``."""
        return self._template is not None and all(text in self._template.source for text in texts)

    @property
    def may_think(self) -> bool:
        """Whether the model was trained to reason, that is, whether its chat template contains the delimiters of reasoning."""
        if self.reply_format is None or self.reply_format.reasoning is None or self._template is None:
            return False
        reasoning = self.reply_format.reasoning
        return any(reasoning.open in t.source or reasoning.close in t.source for t in self._templates)

    @property
    def _templates(self) -> list[ChatTemplate]:
        return [template for template in (self._template, self._tool_template) if template is not None]

    def _need_template(self, tools: list[dict] | None) -> ChatTemplate:
        if self._template is None:
            raise UserError(f"{self._directory} has no chat template; send a prompt instead of messages")
        return (self._tool_template if tools else None) or self._template


def _load_templates(
    directory: Path, config: dict[str, Any], response_template: str, chat_template: str, *, named_tokens: dict[str, str]
) -> tuple[ChatTemplate | None, ChatTemplate | None, ReplyFormat | None]:
    """Load the chat template, the template for conversations with tools (None if the checkpoint has no such template), and the
    reply format.

    Args:
        config: the values of ``tokenizer_config.json``.
        named_tokens: texts of ``bos_token`` and similar tokens; the checkpoint's files take precedence.
    """
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
        choose_format(response_template, None, "")  # raises if the format is invalid
        return None, None, None
    from labinfer.text.chat_template import ChatTemplate  # imported here, so that Jinja is imported only if needed

    special = named_tokens | read_optional(directory / "special_tokens_map.json") | config
    tokens = {
        key: str(value.get("content", "") if isinstance(value, dict) else value)
        for key, value in special.items()
        if key in ("bos_token", "eos_token", "pad_token", "unk_token") and value
    }
    default, with_tools = (ChatTemplate(source, tokens) if isinstance(source, str) else None for source in sources)
    whole = "\n".join(source for source in sources if isinstance(source, str))
    return default, with_tools, choose_format(response_template, config.get("response_template"), whole)


def _read_template(path: Path, flag: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{flag}{path} cannot be read: {reason}") from None
