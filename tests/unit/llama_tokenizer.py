"""Transformers' tokenizer of a SentencePiece model: it reads the file itself only where protobuf is installed, so it is given
what stands in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from transformers import LlamaTokenizer
from transformers.convert_slow_tokenizer import generate_merges


def llama_tokenizer(directory: Path, **config: Any) -> LlamaTokenizer:
    """The tokenizer of ``tokenizer.model``, which begins every text with its BOS token."""
    processor = SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    vocabulary = {processor.id_to_piece(index): index for index in range(processor.get_piece_size())}
    scores = {piece: processor.get_score(index) for piece, index in vocabulary.items()}
    merges = generate_merges(vocabulary, scores)
    return LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, **config)
