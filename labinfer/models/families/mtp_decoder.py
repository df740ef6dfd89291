"""MTPDecoder: a decoder with an MTP layer after its last layer, for drafting (speculative decoding)."""

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
    """``layer`` if the checkpoint has MTP layers, else None.

    Args:
        key: config key of the number of MTP layers.
        default: number of MTP layers if the config lacks ``key``.
    """
    return layer if file.get(key, int, default) > 0 else None


class MTPDecoder(Decoder):
    """Decoder with an MTP layer, whose cache spec is the last of ``cache_specs``. ``mtp`` is None on all stages but the last, and if no MTP
    layer is loaded."""

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
        """Last stage: run the MTP layer on the output of ``final_norm``, (T, D) → (R, D), the input of ``head_logits``.

        Args:
            batch: next tokens, at the positions of the tokens before them.
            cache: cache of the MTP layer, the last of ``cache_specs``.
        """
        if self._ctx.is_first:
            table = self.model.embed_tokens
        else:
            table = self.lm_head if self._config.tied_embeddings else self.mtp_embedding
        number = self._rope_numbers[-1]
        angles = None if number is None else self._rotary[number].at(batch.positions_T)
        embedded_TD = self._embed(table, batch.token_ids_T)
        return self.mtp(embedded_TD, normed_TD, batch, cache, angles, output_rows=output_rows)
