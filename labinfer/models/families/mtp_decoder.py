"""MTPDecoder: a decoder with an MTP layer behind its last one, for checkpoints that bring one to draft with."""

from __future__ import annotations

from typing import Any

import torch

from labinfer.models.config import LayerConfig, ModelConfig
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder, DecoderLayer, make_norm
from labinfer.models.families.layers.mtp import MTPLayer
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.embedding import VocabParallelEmbedding
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows


def read_mtp(file: ConfigFile, layer: LayerConfig, key: str, default: int = 0) -> LayerConfig | None:
    """``layer``, if the checkpoint has MTP layers.

    Args:
        key: names their number.
        default: their number where the config does not say.
    """
    return layer if file.get(key, int, default) > 0 else None


class MTPDecoder(Decoder):
    """Decoder with an MTP layer, the last of ``cache_specs``. ``mtp`` is None on stages but the last, and where none is loaded."""

    def add_parts(self, config: ModelConfig, ctx: StageContext) -> None:
        self.mtp = self.mtp_embedding = None
        if ctx.is_last and config.mtp is not None:
            self.names = self.names.with_mtp(config.num_layers)
            layer = DecoderLayer(config.mtp, config, self.norm_placement, ctx)
            self.mtp = MTPLayer(layer, lambda: make_norm(config, ctx), config.hidden_size, ctx)
            if not (ctx.is_first or config.tied_embeddings):
                self.mtp_embedding = VocabParallelEmbedding(
                    config.vocab_size, config.hidden_size, ctx, "model.embed_tokens"
                )

    def _cached_layers(self) -> list[DecoderLayer]:
        return [*super()._cached_layers(), *([self.mtp.layer] if self.mtp is not None else [])]

    def draft(
        self, batch: ModelInputBatch, normed_TD: torch.Tensor, cache: Any, output_rows: OutputRows
    ) -> torch.Tensor:
        """Last stage: run the MTP layer, (T, D) → (R, D), both as ``head_logits`` takes them.

        Args:
            batch: with the tokens that come next, at the places of those before them.
            cache: the last of ``cache_specs``.
        """
        if self._ctx.is_first:
            table = self.model.embed_tokens
        else:
            table = self.lm_head if self._config.tied_embeddings else self.mtp_embedding
        number = self._rope_numbers[-1]
        angles = None if number is None else self._rotary[number].at(batch.positions_T)
        embedded_TD = self._embed(table, batch.token_ids_T)
        return self.mtp(embedded_TD, normed_TD, batch, cache, angles, output_rows=output_rows)
