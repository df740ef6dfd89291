"""Document: a text that an evaluation scores, read from a plain text file, or from a JSONL file with texts or conversations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from labinfer.base.errors import UserError
from labinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Document:
    """Token ids of a text that an evaluation scores."""

    token_ids: list[int]
    answer: int
    """Index of the first token of the answer (a conversation's last message); for a plain text, the number of its tokens."""


def read_documents(path: Path, flag: str, tokenizer: Tokenizer) -> list[Document]:
    """Read documents from a file: a ``.jsonl`` file has one on each line; any other file is one document.

    A JSONL line is ``{"text": …}`` or ``{"messages": […]}``. The last message is the answer.

    Args:
        flag: option that names the file, for error messages.

    Raises:
        UserError: the file cannot be read, a JSONL line has another form, or the documents have no token to predict.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {path} is not UTF-8: {error.reason} at byte {error.start}") from None
    if path.suffix != ".jsonl":
        documents = [_plain(content, tokenizer)]
    else:
        lines = enumerate(content.split("\n"), start=1)
        documents = [_read_line(line, f"{flag} {path}, line {n}", tokenizer) for n, line in lines if line.strip()]
    documents = [document for document in documents if len(document.token_ids) > 1]
    if not documents:
        raise UserError(f"{flag} {path} has no text of at least two tokens, so there is nothing to predict")
    return documents


def cut(documents: list[Document], length: int) -> list[Document]:
    """Cut documents into parts of at most ``length`` tokens. A part begins with the last token of the part before it, so that every
    token of a document except its first is predicted exactly once."""
    parts = []
    for document in documents:
        for begin in range(0, len(document.token_ids) - 1, length - 1):
            ids = document.token_ids[begin : begin + length]
            parts.append(Document(ids, min(max(0, document.answer - begin), len(ids))))
    return parts


def _plain(text: str, tokenizer: Tokenizer) -> Document:
    token_ids = tokenizer.encode(text)
    return Document(token_ids, len(token_ids))


def _read_line(line: str, where: str, tokenizer: Tokenizer) -> Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return _plain(record["text"], tokenizer)
    messages = record.get("messages") if isinstance(record, dict) else None
    answer = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(answer, dict) or not isinstance(answer.get("content"), str):
        raise UserError(f'{where} has neither "text" nor "messages" whose last one has "content": {line:.60}')
    asked = tokenizer.encode_chat(messages[:-1])
    return Document(asked + tokenizer.encode(answer["content"], add_special_tokens=False), len(asked))
