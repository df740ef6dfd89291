"""End tokens: ids in a config, and the end-of-sequence token of a directory's tokenizer. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from labinfer.base.errors import UserError, first_line
from labinfer.weights.json_file import need_plain_file, read_optional


class AddedToken(msgspec.Struct):
    """Entry of ``added_tokens`` in ``tokenizer.json``."""

    id: int
    content: str


class Vocabulary(msgspec.Struct):
    """Object ``model`` of ``tokenizer.json``; ``vocab`` maps texts to ids, or lists pairs of text and score."""

    vocab: dict[str, int] | list[tuple[str, float]] = {}


class TokenizerFile(msgspec.Struct):
    """Parts of ``tokenizer.json`` that map texts of tokens to their ids."""

    added_tokens: list[AddedToken] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


def configured_ends(config: Mapping[str, Any]) -> list[int]:
    """Token ids in a config's ``eos_token_id``; see ``_ids``."""
    return _ids(config.get("eos_token_id"))


def _ids(value: Any) -> list[int]:
    """Token ids in an ``eos_token_id``, which may be a number, a list, or null. Negative numbers, such as -1 for none, are skipped."""
    values = value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, int) and not isinstance(number, bool) and number >= 0]


def tokenizer_end(directory: Path) -> list[int]:
    """Id of the tokenizer's ``eos_token``; empty if the directory has no tokenizer or the tokenizer has no such token.

    Raises:
        UserError: a tokenizer file is invalid.
    """
    config = read_optional(directory / "tokenizer_config.json")
    token = (read_optional(directory / "special_tokens_map.json") | config).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    text = text if isinstance(text, str) else ""
    added = config.get("added_tokens_decoder")
    for number, entry in added.items() if text and isinstance(added, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == text and number.isdecimal():
            return [int(number)]
    if (directory / "tokenizer.json").exists():
        return _find_in_vocabulary(text, directory / "tokenizer.json") if text else []
    if token_ids := _ids(read_optional(directory / "added_tokens.json").get(text)):
        return token_ids
    return _find_in_pieces(text, directory / "tokenizer.model") if (directory / "tokenizer.model").exists() else []


def vocabulary_id(text: str, directory: Path) -> int | None:
    """Id of the token whose text is ``text`` in the ``tokenizer.json`` of a directory; None if there is none.

    Raises:
        UserError: the file is invalid.
    """
    path = directory / "tokenizer.json"
    return next(iter(_find_in_vocabulary(text, path)), None) if path.exists() else None


def _find_in_vocabulary(text: str, path: Path) -> list[int]:
    """Id of the token ``text`` in a ``tokenizer.json``: among added tokens, else in the vocabulary of its model."""
    need_plain_file(path)
    try:
        file = msgspec.json.decode(path.read_bytes(), type=TokenizerFile)
        if added := [token.id for token in file.added_tokens if token.content == text]:
            return added[:1]
        vocabulary = msgspec.json.decode(file.model, type=Vocabulary).vocab
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UserError(f"{path} is not a valid tokenizer: {error}") from None
    if isinstance(vocabulary, dict):
        return [vocabulary[text]] if text in vocabulary else []
    return [number for number, (piece, _) in enumerate(vocabulary) if piece == text][:1]


def _find_in_pieces(text: str, path: Path) -> list[int]:
    """Id of the piece ``text`` in a ``tokenizer.model``; the model's own end-of-sequence id if ``text`` is empty."""
    from sentencepiece import SentencePieceProcessor  # imported here, as few checkpoints need the library

    need_plain_file(path)
    try:
        processor = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path} is not a valid SentencePiece model: {first_line(error):.120}") from None
    token_id = processor.piece_to_id(text) if text else processor.eos_id()
    is_known = token_id >= 0 and text in ("", processor.id_to_piece(token_id))  # unknown texts get the id of <unk>
    return [token_id] if is_known else []
