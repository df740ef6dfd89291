"""GgufModel: a model in a GGUF file, or in several split files. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labinfer.base.pooling import PoolingConfig
from labinfer.weights.gguf.config import gguf_config, gguf_generation_config
from labinfer.weights.gguf.file import GgufFile, split_paths
from labinfer.weights.model_files import ModelFiles

if TYPE_CHECKING:
    from labinfer.weights.formats.format import Formats
    from labinfer.weights.gguf.checkpoint import GgufCheckpoint

POOLINGS = {1: "mean", 2: "cls", 3: "last"}
"""Pooling methods by llama.cpp's ``pooling_type``."""
RANK = 4


class GgufModel(ModelFiles):
    """Model in GGUF; see ``ModelFiles``. The path names the only file, or the first of several.

    The LM head is the tensor ``output.weight``; without that tensor it is tied to the embedding, and the config says so. So an LM
    head is never missing (``has_head`` is true), and never contradicts the config (``has_different_head`` is false).
    """

    def config(self) -> dict[str, Any]:
        return gguf_config(GgufFile(self.path))

    def generation_config(self) -> dict[str, Any]:
        return gguf_generation_config(GgufFile(self.path))

    def end_ids(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Ids of the tokens that end a generation: ``eos_token_id`` of ``gguf_config``, which includes the tokenizer's end
        token."""
        return tuple(token_id for token_id in config["eos_token_id"] if token_id >= 0)

    def pooling(self, config: Mapping[str, Any]) -> PoolingConfig | None:
        """Pooling by llama.cpp's ``pooling_type``. Vectors are normalized, as in llama.cpp's server."""
        number = config.get("pooling_type", 0)
        if number == RANK:
            refusal = f"{self.path} is a reranker (its pooling_type is {number}), which is not supported"
            return PoolingConfig(refusal=refusal)
        return PoolingConfig(pooling=POOLINGS[number], is_embedder=True) if number in POOLINGS else None

    def weight_files(self) -> list[Path]:
        return split_paths(self.path)

    def formats(self) -> Formats:
        from labinfer.weights.gguf.checkpoint import gguf_formats

        return gguf_formats(self.path)

    def open_weights(self) -> GgufCheckpoint:
        from labinfer.weights.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(self.path)
