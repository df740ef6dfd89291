"""MTPLayer: drafts the token after the next one (multi-token prediction, DeepSeek-AI 2024, arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from labinfer.functions.attention_batch import Angles
from labinfer.models.layers.context import StageContext
from labinfer.models.layers.input_batch import ModelInputBatch, OutputRows
from labinfer.models.layers.linear import ReplicatedLinear
from labinfer.models.layers.norm import RMSNorm


class MTPLayer(nn.Module):
    """A decoder layer over a token's hidden state and the embedding of the next token.

    Embedding and LM head are the model's. Modules are named as in Qwen's checkpoints.

    Args:
        layer: decoder layer of the model's kind.
        make_norm: creates a norm of hidden states.
    """

    def __init__(self, layer: nn.Module, make_norm: Callable[[], RMSNorm], hidden_size: int, ctx: StageContext):
        super().__init__()
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = make_norm(), make_norm()
        self.fc = ReplicatedLinear(2 * hidden_size, hidden_size, ctx, kind="layer")
        self.layers = nn.ModuleDict({"0": layer})
        self.norm = make_norm()

    @property
    def layer(self) -> nn.Module:
        return self.layers["0"]

    def forward(
        self,
        embedded_TD: torch.Tensor,
        hidden_TD: torch.Tensor,
        batch: ModelInputBatch,
        cache: Any,
        angles: Angles | None,
        *,
        output_rows: OutputRows,
    ) -> torch.Tensor:
        """(T, D), (T, D) → (R, D): the input of the LM head, which is also ``hidden_TD`` when the next token is drafted.

        Args:
            embedded_TD: embeddings of the tokens that follow those of the batch.
            hidden_TD: normalized hidden states, as the LM head takes them.
            cache: see ``Mixer``.
        """
        _, embedded_TD = self.pre_fc_norm_embedding(embedded_TD)
        _, hidden_TD = self.pre_fc_norm_hidden(hidden_TD)
        x_TD = self.fc(torch.cat((embedded_TD, hidden_TD), dim=-1))
        hidden_RD, delta_RD = self.layer(x_TD, None, batch, cache, angles, output_rows=output_rows)
        return self.norm(hidden_RD, delta_RD)[1] if len(hidden_RD) else hidden_RD
