"""ScoreHeadConfig and ScoreLinear: the head of classifiers and rerankers on the last stage, replicated on its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from labinfer.base.score_head import ScoreHead
from labinfer.weights.slices import MatrixSlice, TensorSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule, empty_parameter


@dataclass(frozen=True, kw_only=True)
class ScoreHeadConfig:
    """Shape of a score head.

    Args:
        head: labels, or the tokens whose rows of the LM head are read.
        lm_head: path of the LM head's matrix in the model, for ``head.token_ids``.
        vocab_size: rows of the LM head.
        logits_divisor, logits_cap: as in ``ModelConfig``, for ``head.token_ids``.
    """

    head: ScoreHead
    lm_head: str
    vocab_size: int
    logits_divisor: float = 1.0
    logits_cap: float | None = None

    def build(self, hidden_size: int) -> ScoreLinear:
        """Make the module, on torch's current device."""
        return ScoreLinear(self, hidden_size)


class ScoreLinear(WeightedModule):
    """Linear layer without bias in float32, (B, D) → (B, labels)."""

    def __init__(self, config: ScoreHeadConfig, hidden_size: int):
        super().__init__()
        self._config = config
        self.weight = empty_parameter(config.head.num_logits, hidden_size, dtype=torch.float32)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        shape = tuple(self.weight.shape)
        if not self._config.head.token_ids:
            yield TensorSlice(name=f"{prefix}.weight", shape=shape, destination=self.weight)
        for row, token_id in enumerate(self._config.head.token_ids):
            yield MatrixSlice(
                name=self._config.lm_head,
                outputs=self._config.vocab_size,
                inputs=shape[1],
                rows=(token_id, token_id + 1),
                columns=(0, shape[1]),
                destination=self.weight[row : row + 1],
            )

    def forward(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states after the final norm."""
        logits_BL = hidden_BD.float() @ self.weight.T
        if self._config.head.token_ids:
            logits_BL, cap = logits_BL / self._config.logits_divisor, self._config.logits_cap
            logits_BL = logits_BL if cap is None else (logits_BL / cap).tanh() * cap
        return logits_BL
