"""ScoreHead: the head of a classifier or reranker, and the scores that follow from its logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from labinfer.base.errors import UserError

Activation = Literal["none", "sigmoid", "softmax"]
"""Function from logits to scores."""
CLASSIFICATION, REGRESSION, MULTI_LABEL = "single_label_classification", "regression", "multi_label_classification"
ACTIVATIONS: dict[str, Activation] = {CLASSIFICATION: "softmax", REGRESSION: "none", MULTI_LABEL: "sigmoid"}
"""Activation of several labels for each ``problem_type`` of Transformers."""


class ScoreHead(msgspec.Struct, frozen=True, kw_only=True):
    """Head that computes logits from the final hidden state of a prompt's last token.

    It is either the matrix ``score.weight`` of a ``…ForSequenceClassification`` checkpoint, or rows of the LM head (``token_ids``).
    """

    labels: tuple[str, ...] = ("LABEL_0",)
    """Names of the labels in the order of the logits; one label for a reranker."""
    activation: Activation = "sigmoid"
    pad_token_id: int | None = None
    """Padding token, which Transformers does not read at the end of a text; None for none."""
    token_ids: tuple[int, ...] = ()
    """Tokens whose LM head rows give the logits: (no, yes), whose score is the difference yes - no, or one token. Empty for ``score.weight``."""
    template: str = ""
    """Name of the template of query and document (``text/pair_text.py``); empty to choose it by the tokenizer's files."""
    instruction: str = ""
    """Default instruction of the template; empty for the template's own."""

    @property
    def num_logits(self) -> int:
        return len(self.token_ids) or len(self.labels)

    def trim(self, token_ids: list[int]) -> list[int]:
        """Prompt without padding tokens at its end, so that its last token is the one that Transformers' classifiers read: the rightmost
        token that is not the padding token, or the first token if all are."""
        end = len(token_ids)
        while end > 1 and token_ids[end - 1] == self.pad_token_id:
            end -= 1
        return token_ids[:end]

    def scores(self, logits: Sequence[float], use_activation: bool | None = None) -> list[float]:
        """Scores of all labels.

        Args:
            use_activation: False for raw logits (of two tokens, their difference).
        """
        values = [logits[1] - logits[0]] if len(self.token_ids) == 2 else list(logits)
        if use_activation is False or self.activation == "none":
            return values
        if self.activation == "sigmoid":
            return [sigmoid(value) for value in values]
        top = max(values)
        powers = [math.exp(value - top) for value in values]
        total = sum(powers)
        return [power / total for power in powers]

    def relevance(self, logits: Sequence[float], use_activation: bool | None = None) -> float:
        """Score of a pair of texts; see ``scores``."""
        (score,) = self.scores(logits, use_activation)
        return score

    def check_pairs(self) -> None:
        """Check that the model scores pairs of texts.

        Raises:
            UserError: the model has several labels.
        """
        if len(self.labels) > 1:
            raise UserError(
                f"model: this classifier has {len(self.labels)} labels, so its outputs are not scores of pairs; use /classify"
            )

    @property
    def offer(self) -> str:
        """Routes of the model, for errors."""
        return "/classify" if len(self.labels) > 1 else "/score, /rerank and /classify"


def sigmoid(x: float) -> float:
    """Logistic function, without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
