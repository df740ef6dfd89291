"""Keys of ``config.json`` that tell how experts are chosen, from the metadata of GGUF files. Does not import torch.

Source: ggml-org/llama.cpp, gguf-py/gguf/constants.py (``ExpertGatingFuncType``).
"""

from __future__ import annotations

from typing import Any

from labinfer.base.errors import UserError
from labinfer.weights.gguf.file import GgufFile

SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""


def need_scores(file: GgufFile, number: int) -> None:
    """Refuse a file whose experts are scored by another function than the architecture's.

    Args:
        number: ``SOFTMAX`` or ``SIGMOID``.

    Raises:
        UserError: the file's ``expert_gating_func`` is not ``number``.
    """
    scores = file.size(f"{file.prefix}.expert_gating_func", number)
    if scores != number:
        names = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}
        raise UserError(
            f"{file.path}: {file.prefix}.expert_gating_func {scores} is not supported; only {number} ({names[number]}) is"
        )


def read_routing(file: GgufFile) -> dict[str, Any]:
    """Keys for the weights of experts, and for groups of experts if the file has them."""
    groups = {
        key: file.size(f"{file.prefix}.{name}")
        for key, name in (("n_group", "expert_group_count"), ("topk_group", "expert_group_used_count"))
        if f"{file.prefix}.{name}" in file
    }
    return groups | {
        "routed_scaling_factor": file.get(f"{file.prefix}.expert_weights_scale", float, 1.0),
        "norm_topk_prob": file.get(f"{file.prefix}.expert_weights_norm", bool, False),
    }
