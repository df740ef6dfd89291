"""HuggingFaceDirectory: a model directory with ``config.json``, tokenizer files and safetensors. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labinfer.base.errors import UserError
from labinfer.base.pooling import PoolingConfig
from labinfer.weights.files import weight_files
from labinfer.weights.hugging_face.end_tokens import configured_ends, tokenizer_end
from labinfer.weights.hugging_face.pooling import read_pooling
from labinfer.weights.hugging_face.tensor_names import has_head
from labinfer.weights.json_file import read_json, read_optional
from labinfer.weights.model_files import ModelFiles, file_endings

if TYPE_CHECKING:
    from labinfer.weights.checkpoint import Checkpoint
    from labinfer.weights.checkpoint_names import CheckpointNames
    from labinfer.weights.formats.format import Formats

CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"


class HuggingFaceDirectory(ModelFiles):
    """Model in a Hugging Face directory; see ``ModelFiles``."""

    @property
    def config_path(self) -> Path:
        return self.path / CONFIG

    def config(self) -> dict[str, Any]:
        for ending in () if self.config_path.exists() else file_endings():
            if files := sorted(self.path.glob(f"*{ending}")):
                raise UserError(
                    f"{self.path} has no {CONFIG}, but {ending[1:].upper()} files; give one of them, such as --model {files[0]}"
                )
        if not self.config_path.exists() and (self.path / ADAPTER).exists():
            base = read_optional(self.path / ADAPTER).get("base_model_name_or_path")
            of = f" of {base!r:.100}" if isinstance(base, str) else ""
            raise UserError(
                f"{self.path} is a LoRA adapter{of} ({ADAPTER} without {CONFIG}), not a model; merge it into its model by PEFT's "
                "merge_and_unload, save that with save_pretrained, and give its directory"
            )
        return read_json(self.config_path)

    def generation_config(self) -> dict[str, Any]:
        return read_optional(self.path / GENERATION)

    def end_ids(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Ids of the tokens that end a generation, as in vLLM: ``eos_token_id`` of ``generation_config.json`` (else of
        ``config.json``), and the tokenizer's ``eos_token``."""
        ids = configured_ends(self.generation_config()) or configured_ends(config)
        return tuple(dict.fromkeys([*ids, *tokenizer_end(self.path)]))

    def pooling(self, config: Mapping[str, Any]) -> PoolingConfig | None:
        return read_pooling(self.path)

    def weight_files(self) -> list[Path]:
        return weight_files(self.path)

    def has_head(self) -> bool:
        return has_head(self.path)

    def has_different_head(self, names: CheckpointNames) -> bool:
        from labinfer.weights.hugging_face.output_head import has_different_head

        return has_different_head(self.path, names)

    def formats(self) -> Formats:
        from labinfer.weights.formats.registry import read_formats

        return read_formats(read_optional(self.config_path), self.config_path)

    def open_weights(self) -> Checkpoint:
        from labinfer.weights.hugging_face.stacked_checkpoint import StackedCheckpoint

        return StackedCheckpoint(self.path, self.formats())
