"""Mutated GGUF files: read or refused in one line."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from fuzzing import fuzz, mutate

from labinfer.base.errors import UserError
from labinfer.models.registry import load_config
from labinfer.text.tokenizer import Tokenizer
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.header import SCALARS
from labinfer.weights.model_files import open_model


def _seed(path, model: str) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_feed_forward_length(32)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("llama-bpe")
    texts = ["<unk>", "a", "b", "ab", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    writer.add_token_list(texts)
    writer.add_token_types([2, 1, 1, 1, 3, 3, *[6] * 256])
    writer.add_token_scores([0.0] * len(texts))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(4)
    writer.add_eos_token_id(5)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _mutate_header(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A byte or a whole number before the tensors' data is another one, as lengths and counts are what a reader trusts."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(4, len(data) - 400)
        size = draw.choice((1, 4, 8))
        data[at : at + size] = draw.choice((0, 1, 2**7, 2 ** (8 * size) - 1, 2 ** (8 * size - 1))).to_bytes(
            size, "little"
        )
    return bytes(data)


def encode(path: Path) -> None:
    tokenizer = Tokenizer(path)
    tokenizer.decode(tokenizer.encode("ab <s>"))
    if tokenizer.has_chat_template:
        tokenizer.encode_chat([{"role": "user", "content": "ab"}])


def read_values(path: Path) -> None:
    checkpoint = open_model(path).open_weights()
    for name in checkpoint.names:
        if len(shape := checkpoint.shape(name)) == 1:
            checkpoint.read(name, shape, (), torch.float32)


def test_gguf_files_are_read_or_refused(cases, tmp_path):
    path = tmp_path / "model.gguf"
    seeds = [_seed(path, model) for model in ("gpt2", "llama")]

    def read(data: bytes) -> None:
        path.write_bytes(data)
        file = GgufFile(path)
        for key, value in list(file._values.items()):
            if hasattr(value, "kind"):
                file.numbers(key) if value.kind in SCALARS else file.texts(key)
        refusals = []
        for use in (load_config, read_values, encode):
            try:
                use(path)
            except UserError as error:
                refusals.append(error)
        if refusals:
            raise refusals[0]

    for change in (mutate, _mutate_header):
        counts = fuzz(read, seeds, refusals=(UserError,), change=change, **cases(300))
        assert counts["taken"] > counts.total() // 20, "the seeds are refused before anything is read"
