"""Backends of ``Tokenizer``: ``tokenizer.json`` by Hugging Face's tokenizers, ``tokenizer.model`` by SentencePiece."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from labinfer.base.errors import UserError, first_line, is_failure
from labinfer.text.byte_rules import FALLBACK, MAX_TOKENS, ByteRules, read_byte_rules
from labinfer.text.token_decoder import ByteDecoder, ContextDecoder, TokenDecoder
from labinfer.text.tokenizer_patterns import check_patterns
from labinfer.weights.json_file import read_optional

SPACE = "▁"
"""Character by which SentencePiece represents a space."""


class TokenizerBackend(Protocol):
    """Interface by which ``Tokenizer`` uses a tokenizer library."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Convert a text to token ids."""

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Convert a pair of texts to token ids, with special tokens."""

    def decoder(self, shown: Collection[int] = (), inside: bool = False) -> TokenDecoder:
        """Make a decoder for one sequence of token ids.

        Args:
            shown: ids of special tokens that add text; all other special tokens add none.
            inside: whether the tokens continue an earlier text. If not, the space that the library adds before every
                text is removed.
        """

    def token_bytes(self, token_id: int) -> bytes | None:
        """UTF-8 bytes of a token that is not the first of a text, which may be only a part of a character. None if the library
        gives only texts."""

    def name(self, token_id: int) -> str | None:
        """Vocabulary entry of a token; None if it has none."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def added_tokens(self) -> dict[str, int]: ...
    @property
    def special_tokens(self) -> dict[str, int]: ...
    @property
    def named_tokens(self) -> dict[str, str]:
        """Texts of ``bos_token`` and similar tokens, if the vocabulary itself defines them."""


class FastBackend:
    """Backend for ``tokenizer.json`` (Hugging Face tokenizers).

    Args:
        source: contents of a ``tokenizer.json``, in place of the file ``path`` (which is of another kind).
    """

    def __init__(self, path: Path, source: str = ""):
        from tokenizers import Tokenizer as FastTokenizer

        try:
            self._tokenizer = FastTokenizer.from_str(source) if source else FastTokenizer.from_file(str(path))
        except BaseException as error:
            if not is_failure(error):
                raise
            raise UserError(f"{path} is not a valid tokenizer: {first_line(error):.120}") from None
        try:
            for component in (self._tokenizer.normalizer, self._tokenizer.pre_tokenizer):
                check_patterns(component)
        except ValueError as error:
            raise UserError(f"{path} is not supported: {error}") from None
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self.named_tokens: dict[str, str] = {}
        self._hidden = frozenset(self.special_tokens.values())
        decoder = self._tokenizer.decoder
        self._rules = read_byte_rules(json.loads(decoder.__getstate__()), self.name) if decoder else None
        self._letter = self._find_letter() if self._rules is None else None

    def _find_letter(self) -> int | None:
        """Id of a token that is a single letter. Other tokens are decoded after it, as the library drops a leading space at the
        beginning of a text. None if the library does not drop spaces."""
        space = self._tokenizer.token_to_id(SPACE)
        if space is None or self._decode([space]):
            return None
        ids = map(self._tokenizer.token_to_id, string.ascii_letters)
        return next((token for token in ids if token is not None and len(self._decode([token])) == 1), None)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Unlike encode, encode_batch_fast releases the GIL and computes no offsets.
        try:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:  # noqa: BLE001 - a panic of the Rust library, too
            raise _refusal(error, f"this text of {len(text)} characters, {text[:40]!r}") from None

    def encode_pair(self, first: str, second: str) -> list[int]:
        try:
            return self._tokenizer.encode_batch_fast([(first, second)])[0].ids
        except BaseException as error:  # noqa: BLE001 - a panic of the Rust library, too
            raise _refusal(error, f"a pair of texts of {len(first)} and {len(second)} characters") from None

    def decoder(self, shown: Collection[int] = (), inside: bool = False) -> TokenDecoder:
        hidden = self._hidden.difference(shown) if shown else self._hidden
        if self._rules is not None:
            return ByteDecoder(self._rules, hidden, inside)
        return ContextDecoder(lambda ids: self._decode([token for token in ids if token not in hidden], inside))

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._rules.token_bytes(token_id) if self._rules else None

    def _decode(self, token_ids: list[int], inside: bool = False) -> str:
        """Decode ``token_ids`` by the library, including special tokens."""
        if not token_ids:
            return ""  # some decoders fail on an empty list
        if inside and self._letter is not None:
            return self._decode([self._letter, *token_ids])[1:]
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        except BaseException as error:  # noqa: BLE001 - a panic of the Rust library, too
            raise _refusal(error, f"{len(token_ids)} tokens, {token_ids[:8]}") from None

    def name(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()


def _refusal(error: BaseException, given: str) -> BaseException:
    """Error to raise in place of ``error``, an exception of the library: ``error`` itself if it is about the type of the argument,
    else a ``UserError``, also for a panic in Rust.

    Args:
        given: description of the library's input.
    """
    if isinstance(error, (TypeError, UnicodeError)) or not is_failure(error):
        return error
    return UserError(f"the tokenizer fails on {given}: {str(error)!r:.100}")


GUARD = "\ue000"
"""Character that no vocabulary has. In the text after it, SentencePiece neither adds nor drops a leading space."""


class SentencePieceBackend:
    """Backend for ``tokenizer.model`` (SentencePiece).

    SentencePiece itself encodes the text of special tokens like any other text. This backend also finds, in texts, control symbols
    and tokens that the checkpoint adds, as chat templates write them. Text after such a token gets no extra leading space, unless
    the config sets ``legacy``. The config also says whether a text gets a leading space (``add_prefix_space``), the
    beginning-of-sequence token (``add_bos_token``) and the end-of-sequence token (``add_eos_token``).

    Args:
        model: contents of a ``tokenizer.model``, in place of the file ``path`` (which is of another kind).
        config: values of ``tokenizer_config.json``; by default, of the file next to ``path``.
    """

    def __init__(self, path: Path, model: bytes = b"", config: dict[str, Any] | None = None):
        from sentencepiece import SentencePieceProcessor

        self.special_tokens, self.added_tokens, added_later = {}, {}, {}
        if config is None:
            config = read_optional(path.with_name("tokenizer_config.json"))
            added_later = read_optional(path.with_name("added_tokens.json"))
        try:
            source = {"model_proto": model} if model else {"model_file": str(path)}
            self._processor = SentencePieceProcessor(**source)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path} is not a valid SentencePiece model: {first_line(error):.120}") from None
        self._guard, self._is_legacy = self._processor.encode(GUARD), bool(config.get("legacy"))
        self._has_first_space = config.get("add_prefix_space") is not False
        bos, eos, unk = self._processor.bos_id(), self._processor.eos_id(), self._processor.unk_id()
        self._before = [bos] * (bos >= 0 and config.get("add_bos_token") is not False)
        self._behind = [eos] * (eos >= 0 and config.get("add_eos_token") is True)
        named = (("bos_token", bos), ("eos_token", eos), ("unk_token", unk))
        self.named_tokens = {name: self._processor.id_to_piece(token) for name, token in named if token >= 0}
        for token_id in range(self._processor.get_piece_size()):
            if self._processor.is_control(token_id) or self._processor.is_unknown(token_id):
                self.special_tokens[self._processor.id_to_piece(token_id)] = token_id
        for content, token_id, is_special in _added_tokens(path, added_later, config):
            (self.special_tokens if is_special else self.added_tokens)[content] = token_id
        self.added_tokens |= self.special_tokens
        self._names = {token_id: content for content, token_id in self.added_tokens.items()}
        self._hidden = frozenset(self.special_tokens.values())
        token_bytes = lru_cache(MAX_TOKENS)(self._read_bytes)
        num_stripped = int(self._has_first_space and self._drops_space())
        self._rules = ByteRules(token_bytes, token_bytes, " ", num_stripped)
        longest_first = sorted(filter(None, self.added_tokens), key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def encode_pair(self, first: str, second: str) -> list[int]:
        return self.encode(first, True) + self.encode(second, True)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = list(self._before) if add_special_tokens else []
        for index, part in enumerate(self._marks.split(text)):
            if index % 2:
                ids.append(self.added_tokens[part])
            elif not self._has_first_space or (index and (part.startswith(" ") or not self._is_legacy)):
                ids += self._processor.encode(GUARD + part)[len(self._guard) :]
            else:
                ids += self._processor.encode(part)
        return ids + self._behind if add_special_tokens else ids

    def decoder(self, shown: Collection[int] = (), inside: bool = False) -> TokenDecoder:
        hidden = self._hidden.difference(shown) if shown else self._hidden
        return ByteDecoder(self._rules, hidden, inside)

    def token_bytes(self, token_id: int) -> bytes:
        return self._rules.token_bytes(token_id)

    def _read_bytes(self, token_id: int) -> bytes:
        if token_id in self._names:
            return self._names[token_id].encode()
        if token_id >= self._processor.get_piece_size():
            return b""
        piece = self._processor.id_to_piece(token_id)
        if self._processor.is_byte(token_id) and (fallback := FALLBACK.fullmatch(piece)):
            return bytes([int(fallback[1], 16)])
        return piece.replace(SPACE, " ").encode()

    def _drops_space(self) -> bool:
        """Whether decoding a text removes the leading space of its first piece."""
        for token_id in range(self._processor.get_piece_size()):
            if token_id not in self._names and self._processor.id_to_piece(token_id).startswith(SPACE):
                return not self._processor.decode([token_id]).startswith(" ")
        return False

    def name(self, token_id: int) -> str | None:
        if token_id in self._names:
            return self._names[token_id]
        return self._processor.id_to_piece(token_id) if token_id < self._processor.get_piece_size() else None

    @property
    def vocab_size(self) -> int:
        return max([self._processor.get_piece_size(), *(token_id + 1 for token_id in self._names)])


def _added_tokens(path: Path, later: dict[str, Any], config: dict[str, Any]) -> Iterator[tuple[str, int, bool]]:
    """Yield the tokens that a checkpoint adds to SentencePiece's vocabulary, each as (text, id, whether the token is special).

    Args:
        path: path of the SentencePiece model.
        later, config: values of ``added_tokens.json`` and ``tokenizer_config.json``.
    """
    try:
        for content, token_id in later.items():
            yield content, int(token_id), False
        for token_id, token in (config.get("added_tokens_decoder") or {}).items():
            yield token["content"], int(token_id), bool(token.get("special"))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path.parent} has added tokens without text or id in added_tokens.json or tokenizer_config.json"
        ) from None
