"""Cross-encoders in the files of sentence-transformers: token logits and activation. Does not import torch.

Source: sentence-transformers 5.4, module ``LogitScore`` and default activation of cross-encoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError
from labinfer.base.score_head import Activation, ScoreHead
from labinfer.weights.hugging_face.pooling import PROMPTS_FILE, module_folders
from labinfer.weights.json_file import read_optional

SCORE_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none"}
"""Activation for each supported class name of ``activation_fn``."""


def read_logit_score(model: Path) -> ScoreHead | None:
    """Score head that ``modules.json`` describes by a module ``LogitScore``; None if there is none.

    Raises:
        UserError: the module is invalid, or one of its settings is not supported.
    """
    folders = module_folders(model)
    if list(folders) != ["Transformer", "LogitScore"]:
        return None
    path, settings = folders["LogitScore"] / "config.json", read_optional(model / PROMPTS_FILE)
    values = read_optional(path)
    ids = [values.get(name) for name in ("false_token_id", "true_token_id")]
    if ids[0] is None:
        del ids[0]
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in ids):
        raise UserError(f"{path}: true_token_id and false_token_id should be token ids, not {ids!r:.60}")
    activation = read_activation(model) or "sigmoid"
    return ScoreHead(token_ids=tuple(ids), activation=activation, instruction=_default_prompt(settings))


def read_activation(model: Path, config: Mapping[str, Any] | None = None) -> Activation | None:
    """Activation of a cross-encoder's scores; None if no file names one.

    Args:
        config: values of ``config.json``, in which sentence-transformers before 5.4 writes the activation; None to leave them out.

    Raises:
        UserError: the activation is not supported.
    """
    config = config or {}
    own = config.get("sentence_transformers")
    places = (
        (PROMPTS_FILE, "activation_fn", read_optional(model / PROMPTS_FILE)),
        ("config.json", "activation_fn", own if isinstance(own, dict) else {}),
        ("config.json", "sbert_ce_default_activation_function", config),
    )
    for file, key, values in places:
        if path := values.get(key):
            name = str(path).rpartition(".")[2]
            if name not in SCORE_ACTIVATIONS:
                known = ", ".join(SCORE_ACTIVATIONS)
                raise UserError(f"{model / file}: {key} {path!r:.80} is not supported; supported are {known}")
            return SCORE_ACTIVATIONS[name]
    return None


def _default_prompt(settings: dict[str, Any]) -> str:
    """Text of the default prompt, which is the instruction of a reranker; empty for none."""
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    text = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    return text if isinstance(text, str) else ""
