"""The decoder that every family shares: embedding, this stage's layers, final norm, LM head.

A family defines the mixer (attention, or another module that combines tokens) and the MLP of each layer
(``ModelConfig.layers``), the placement of norms (``norm_placement``), and its checkpoint names (``names``). A rank
builds only the layers of its stage. The first stage has the embedding, the last one the final norm and the LM head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from labinfer.functions.attention_batch import Angles
from labinfer.functions.calls import FunctionCall
from labinfer.models.config import LayerConfig, ModelConfig
from labinfer.models.config_file import ConfigFile
from labinfer.models.layers.cache_spec import CacheSpec
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.embedding import VocabParallelEmbedding
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows
from labinfer.models.layers.norm import RMSNorm
from labinfer.models.layers.rope import RopeConfig, RotaryTable
from labinfer.weights.checkpoint_names import CheckpointNames
from labinfer.weights.loader import choose_forms

NormPlacement = Literal["pre", "post", "sandwich"]
"""Norms before mixer and MLP (pre-norm, Xiong et al. 2020, arXiv:2002.04745), after them (post-norm, OLMo 2, arXiv:2501.00656), or both
(sandwich norm, Ding et al. 2021, arXiv:2105.13290)."""


class DecoderLayer(nn.Module):
    """Decoder layer: a mixer (attention or another module that combines tokens) and an MLP, with norms."""

    def __init__(self, layer: LayerConfig, config: ModelConfig, placement: NormPlacement, ctx: StageContext):
        super().__init__()

        def norm(*placements: NormPlacement) -> RMSNorm | None:
            return make_norm(config, ctx) if placement in placements else None

        self.input_layernorm = norm("pre", "sandwich")
        self.self_attn = layer.mixer.build(config.hidden_size, ctx)
        self.self_attn_output_norm = norm("post", "sandwich")
        self.post_attention_layernorm = norm("pre", "sandwich")
        self.mlp = layer.mlp.build(config.hidden_size, ctx)
        self.mlp_output_norm = norm("post", "sandwich")
        self._residual_scale, self._mlp_reads_hidden = _factor(config.residual_scale), layer.mlp.reads_hidden

    def forward(
        self,
        hidden_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        batch: ModelInputBatch,
        cache: Any,
        angles: Angles | None,
        *,
        output_rows: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on hidden states, to which its first norm adds ``delta_TD``, the previous layer's last output
        (fused add and norm). Returns the layer's hidden states and delta, not added yet.

        Args:
            output_rows: rows to return, (R, D); None for all.
        """
        hidden_TD, x_TD = _add_and_norm(hidden_TD, delta_TD, self.input_layernorm)
        if output_rows is None:
            delta_TD = self.self_attn(x_TD, batch, cache, angles)
        else:
            delta_TD, hidden_TD = self.self_attn(x_TD, batch, cache, angles, output_rows), hidden_TD[output_rows.rows_R]
            if not len(hidden_TD):
                return hidden_TD, delta_TD
        if self.self_attn_output_norm is not None:
            _, delta_TD = self.self_attn_output_norm(delta_TD)
        delta_TD = _scale(delta_TD, self._residual_scale)
        hidden_TD, x_TD = _add_and_norm(hidden_TD, delta_TD, self.post_attention_layernorm)
        delta_TD = self.mlp(x_TD, hidden_TD) if self._mlp_reads_hidden else self.mlp(x_TD)
        if self.mlp_output_norm is not None:
            _, delta_TD = self.mlp_output_norm(delta_TD)
        return hidden_TD, _scale(delta_TD, self._residual_scale)


def make_norm(config: ModelConfig, ctx: StageContext) -> RMSNorm:
    """Make an RMS norm of the hidden states."""
    return RMSNorm(config.hidden_size, config.norm_eps, ctx, config.norm_offset)


def _factor(number: float) -> torch.Tensor | None:
    """A factor or divisor as a tensor, so that captured steps can replay the operation; None for 1."""
    return None if number == 1.0 else torch.tensor(number, dtype=torch.float32, device="cpu")


def _scale(x_TD: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return x_TD if factor is None else x_TD * factor


def _add_and_norm(
    hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None, norm: RMSNorm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if norm is not None:
        return norm(hidden_TD, delta_TD)
    hidden_TD = hidden_TD if delta_TD is None else hidden_TD + delta_TD
    return hidden_TD, hidden_TD


class StageModel(nn.Module):
    """Modules of one pipeline stage; the keys of ``layers`` are layer indices of the whole model."""

    def __init__(
        self, config: ModelConfig, placement: NormPlacement, layer_class: type[DecoderLayer], ctx: StageContext
    ):
        super().__init__()
        if ctx.is_first:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, ctx)
        self.layers = nn.ModuleDict(
            {
                str(n): layer_class(config.layers[n], config, placement, ctx)
                for n in range(ctx.first_layer, ctx.last_layer)
            }
        )
        if ctx.is_last:
            self.norm = make_norm(config, ctx)


class Decoder(nn.Module):
    """One rank's share of a model. Parameters are named as in Llama's checkpoints, except for merged projections.

    A family is a subclass, registered under its name in ``architectures`` of ``config.json``:

    - ``read_config`` is a class method. Every rank calls it when a model is loaded, and ``launch.py plan`` calls it before there is a
      device. It reads nothing but ``file``, so that all ranks get equal results.
    - ``norm_placement`` and ``names`` are class attributes; most families need no more.
    - A new kind of layer is a mixer or an MLP class (``layers/mixer.py``) that ``read_config`` puts into ``layers``.
    - Other modules of a family are built in ``add_parts`` and called in an override of ``run_layers``.
    """

    norm_placement: ClassVar[NormPlacement] = "pre"
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    names: ClassVar[CheckpointNames] = CheckpointNames()

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        """Read the family's ``config.json``.

        Raises:
            UserError: a key is missing or invalid.
        """
        raise NotImplementedError

    def __init__(self, config: ModelConfig, ctx: StageContext):
        super().__init__()
        self._ctx, self._dtype, self._config = ctx, ctx.dtype, config
        self.model = StageModel(config, self.norm_placement, self.layer_class, ctx)
        if ctx.is_last and ctx.is_first and config.tied_embeddings:
            self.lm_head = self.model.embed_tokens  # tied weights are stored once
        elif ctx.is_last:
            tied = "model.embed_tokens" if config.tied_embeddings else None
            self.lm_head = VocabParallelEmbedding(config.vocab_size, config.hidden_size, ctx, tied)
        self.score = config.score_head.build(config.hidden_size) if ctx.is_last and config.score_head else None
        self.add_parts(config, ctx)
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=ctx.dtype, device="cpu")
        """A tensor, so that captured steps can replay the product."""
        cap = config.logits_cap
        self._logits_divisor = _factor(config.logits_divisor)
        self._logits_cap = None if cap is None else torch.tensor(cap, dtype=torch.float32, device="cpu")
        self._ropes: list[RopeConfig] = []
        """Distinct rotary configs of the stage's layers."""
        self._rope_numbers: list[int | None] = []
        """Index into ``_ropes`` for each layer; None for layers without a rotary embedding."""
        numbers = range(ctx.first_layer, ctx.last_layer)
        sources = [config.layers[number].cache_layer for number in numbers]
        self._places = [
            (index, index if source is None else source - ctx.first_layer) for index, source in enumerate(sources)
        ]
        """For each layer: its index in the stage, and the index of the layer whose cache it uses (an earlier layer with KV sharing)."""
        for layer in self._cached_layers():
            rope = layer.self_attn.rope
            if rope is not None and rope not in self._ropes:
                self._ropes.append(rope)
            self._rope_numbers.append(None if rope is None else self._ropes.index(rope))
        self._rotary: list[RotaryTable] = []
        choose_forms(self, ctx.form)

    def add_parts(self, config: ModelConfig, ctx: StageContext) -> None:
        """Build the family's modules besides layers, embedding, norm and LM head; called in the constructor."""

    def _cached_layers(self) -> list[DecoderLayer]:
        """Layers with a cache spec, in the order of ``cache_specs``."""
        return [*self.model.layers.values()]

    def calls(self) -> Iterator[FunctionCall]:
        """Function calls of the LM head's matrix products; layers list their own calls."""
        if self._ctx.is_last:
            yield from self.lm_head.product_calls()

    def cache_specs(self) -> list[CacheSpec]:
        """Cache spec of each layer of the stage."""
        return [layer.self_attn.cache_spec() for layer in self._cached_layers()]

    def expert_loads(self) -> dict[int, torch.Tensor]:
        """Tokens routed to each expert so far, (E,) int64, by layer; empty except on the stage's first TP rank.

        The model's last layer counts only tokens of ``output_rows``.
        """
        if self._ctx.tp.rank > 0:
            return {}
        return {
            int(number): module.num_tokens_E
            for number, layer in self.model.layers.items()
            for module in layer.modules()
            if hasattr(module, "num_tokens_E")
        }

    def with_layers(self, indices: Sequence[int]) -> Decoder:
        """Return a decoder that runs only some layers of this decoder, on shared weights; for measurements.

        Args:
            indices: indices of the layers in the stage, ascending; at least one.
        """
        part, stage = copy(self), copy(self.model)
        part._modules, stage._modules = dict(self._modules), dict(self.model._modules)
        layers = list(self.model.layers.items())
        stage.layers, part.model = nn.ModuleDict(layers[index] for index in indices), stage
        part._rope_numbers = [self._rope_numbers[index] for index in indices]
        part._places = [self._places[index] for index in indices]
        return part

    def make_rotary_tables(self, length: int, device: torch.device, max_num_batched_tokens: int = 0) -> None:
        """Create the rotary tables; called once, before the first ``forward``.

        Args:
            length: maximum context length.
            max_num_batched_tokens: maximum tokens of a step, for ``place_prompts``.
        """
        num_placed = max_num_batched_tokens if self._config.dynamic_rope_from else 0
        self._rotary = [RotaryTable(rope, length, self._dtype, device, num_placed) for rope in self._ropes]
        self.rotary_length = length

    def cover_positions(self, length: int) -> None:
        """Extend the rotary tables to contexts of ``length`` tokens; called before each ``forward``, captured steps included."""
        for table in self._rotary:
            table.cover(length)

    def place_prompts(self, positions: Sequence[int], lengths: Sequence[int]) -> None:
        """Fill the additional rows of the rotary tables (from row ``rotary_length`` on) for tokens of long prompts, before each ``forward``.

        Args:
            positions: position of each token, in the order of the rows.
            lengths: length of each token's prompt.
        """
        positions_S, lengths_S = torch.tensor(positions, device="cpu"), torch.tensor(lengths, device="cpu")
        for table in self._rotary:
            table.place(positions_S, lengths_S)

    @property
    def dynamic_rope_from(self) -> int:
        """Prompt length beyond which ``dynamic`` rope depends on the length; 0 if no layer has it."""
        return self._config.dynamic_rope_from

    @property
    def is_causal(self) -> bool:
        """Whether attention is causal. If False, a token attends to all tokens of its prompt."""
        return self._config.is_causal

    def rotary_table(self, rope: RopeConfig) -> RotaryTable:
        """Rotary table of one of the stage's layers."""
        return self._rotary[self._ropes.index(rope)]

    def forward(self, batch: ModelInputBatch, hidden_TD: torch.Tensor | None, caches: list[Any]) -> torch.Tensor:
        """Run this stage. The first stage takes token ids, the others the previous stage's activations → (T, D); the last stage returns only
        the batch's ``output_rows``, (R, D).

        Args:
            caches: caches of all layers of the stage, also if only some run (``with_layers``); see ``cache_specs``.
        """
        if self._ctx.is_first:
            hidden_TD = self._embed(self.model.embed_tokens, batch.token_ids_T)
        return self.run_layers(batch, hidden_TD, caches)

    def run_layers(
        self, batch: ModelInputBatch, hidden_TD: torch.Tensor, caches: list[Any], inputs_TLP: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the stage's layers on embedded tokens or activations; returns the result of ``forward``.

        Args:
            inputs_TLP: per-layer embeddings (tokens, layers, P), for families whose ``layer_class`` takes them.
        """
        angles = [table.at(batch.positions_T) for table in self._rotary]
        delta_TD = None
        for index, (layer, (place, source)) in enumerate(zip(self.model.layers.values(), self._places, strict=True)):
            number = self._rope_numbers[index]
            hidden_TD, delta_TD = layer(
                hidden_TD,
                delta_TD,
                batch,
                caches[source],
                None if number is None else angles[number],
                output_rows=batch.output_rows if self._ctx.is_last and index == len(self._places) - 1 else None,
                **({} if inputs_TLP is None else {"input_TP": inputs_TLP[:, place]}),
            )
        return hidden_TD + delta_TD

    def _embed(self, table: VocabParallelEmbedding, token_ids_T: torch.Tensor) -> torch.Tensor:
        embedded_TD = table(token_ids_T)
        return embedded_TD if self._config.embedding_scale == 1.0 else embedded_TD * self._embedding_scale

    def share(self, numbers: Sequence[int] | None, count: int) -> list[int]:
        """Broadcast ``count`` numbers from the stage's first rank to its other ranks. Returns them on every rank."""
        return self._ctx.tp.share(numbers, count)

    def final_norm(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Last stage: normalize the output of ``forward``; Transformers' ``last_hidden_state``."""
        return self.model.norm(hidden_TD)[1]

    def pooled(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Last stage: result of pooled prompts, (B, D) → logits (B, labels) if the model has a score head, else unchanged."""
        return hidden_BD if self.score is None else self.score(hidden_BD)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor | None:
        """Last stage: logits of ``forward``'s output, (B, D) → (B, V) on TP rank 0, None on its other ranks; see
        ``VocabParallelEmbedding``."""
        return self.head_logits(self.final_norm(hidden_BD))

    def head_logits(self, hidden_BD: torch.Tensor) -> torch.Tensor | None:
        """Last stage: logits of ``final_norm``'s output, (B, D) → (B, V) on TP rank 0, None on its other ranks."""
        if self._logits_divisor is not None:
            hidden_BD = hidden_BD / self._logits_divisor
        logits_BV, cap = self.lm_head.logits(hidden_BD), self._logits_cap
        return logits_BV if logits_BV is None or cap is None else (logits_BV / cap).tanh() * cap
