"""Vocabularies in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from gguf import GGUFWriter, TokenType
from sentencepiece import SentencePieceProcessor


def add_tokenizer(writer: GGUFWriter, checkpoint: Path, pre: str) -> None:
    """The vocabulary of a ``tokenizer.json`` of BPE over bytes, and the chat template."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    texts = {number: (text, TokenType.NORMAL) for text, number in tokenizer["model"]["vocab"].items()}
    for token in tokenizer["added_tokens"]:
        texts[token["id"]] = token["content"], TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    ids = {text: number for number, (text, _) in texts.items()}
    tokens = [texts.get(number, (f"[PAD{number}]", TokenType.UNUSED)) for number in range(max(texts) + 3)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, add in (("eos_token", writer.add_eos_token_id), ("bos_token", writer.add_bos_token_id)):
        if config.get(name):
            add(ids[config[name]])
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])


def add_sentencepiece(
    writer: GGUFWriter,
    path: Path,
    added: dict[int, tuple[str, TokenType]],
    user_defined: Collection[str] = (),
    spaces: str = " ",
) -> None:
    """The pieces of a ``tokenizer.model``, and tokens behind them.

    Args:
        user_defined: pieces that are found in texts as a whole.
        spaces: how those in such pieces are written.
    """
    processor = SentencePieceProcessor(model_file=str(path))
    kinds = {
        TokenType.UNKNOWN: processor.is_unknown,
        TokenType.CONTROL: processor.is_control,
        TokenType.UNUSED: processor.is_unused,
        TokenType.BYTE: processor.is_byte,
    }
    size = processor.get_piece_size()
    tokens = [
        (processor.id_to_piece(n), next((kind for kind, holds in kinds.items() if holds(n)), TokenType.NORMAL))
        for n in range(size)
    ]
    tokens = [
        (text.replace("▁", spaces), TokenType.USER_DEFINED) if text in user_defined else (text, kind)
        for text, kind in tokens
    ]
    tokens += [added[n] for n in range(size, size + len(added))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_scores([processor.get_score(n) for n in range(size)] + [-1000.0] * len(added))
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_unk_token_id(processor.unk_id())
