"""Names of the model families, available without torch, so that unsupported models are rejected early."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError
from labinfer.base.registry import REGISTRY
from labinfer.weights.model_files import open_model

CAUSAL_LM, WITH_PICTURES = "ForCausalLM", "ForConditionalGeneration"
AS_OTHER = '; if its layers are those of {0}, set architectures to ["{0}"] in config.json of a copy of the directory'
CLASSIFIER = "ForSequenceClassification"
ENCODER = (
    ": it is an encoder like BERT, and LABInfer runs decoders; choose a model on a decoder, such as Qwen3-Embedding"
)


def base_models() -> dict[str, str]:
    """Transformers' class name of a family's model without an LM head, such as ``Qwen3Model`` → the family.

    Kimi K2.5, MiniMax-M3 and Step-3.5 and 3.7 are left out: no release has the names of their base models.
    """
    names = REGISTRY.names("model_family")
    return {
        base: name
        for name in names
        if (base := _base_model(name, names)) not in names and not name.startswith(("Kimi", "MiniMaxM3", "Step3"))
    }


def classifiers() -> dict[str, str]:
    """Transformers' class name of a family's sequence classifier, such as ``Qwen3ForSequenceClassification`` → the family."""
    return {base.removesuffix("Model") + CLASSIFIER: name for base, name in base_models().items()}


def _base_model(name: str, names: tuple[str, ...]) -> str:
    stem = name.removesuffix(WITH_PICTURES).removesuffix(CAUSAL_LM)
    return f"{stem}TextModel" if name.endswith(CAUSAL_LM) and stem + WITH_PICTURES in names else f"{stem}Model"


def check_architecture(directory: Path) -> None:
    """Reject a checkpoint whose config shows that ``registry.load_config`` would reject it.

    Raises:
        UserError: there is no config, it is broken, or its architecture is not supported.
    """
    files = open_model(directory)
    path, values = files.config_path, files.config()
    refuse_unknown(path, values)
    if values.get("architectures") is None:
        raise UserError(f"{path} has no 'architectures'; is the checkpoint complete?")


def refuse_unknown(path: Path, values: Mapping[str, Any]) -> None:
    """Reject the config at ``path`` if its only architecture is unknown, or if it lists none and has custom code (``auto_map``).

    Raises:
        UserError: the architecture is not supported; the message names the most similar one, and lists all.
    """
    names, families = values.get("architectures"), REGISTRY.names("model_family")
    is_one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    if not names and values.get("auto_map"):
        what = f"model_type {values.get('model_type')!r:.60} without 'architectures'"
    elif is_one and names[0] not in {*families, *base_models(), *classifiers()}:
        what = f"architecture {names[0]!r:.60}"
    else:
        return
    if "bert" in what.lower():  # BertModel, XLMRobertaModel, ModernBertModel …
        raise UserError(f"{path}: {what} is not supported{ENCODER}")
    advice = "".join(map(AS_OTHER.format, difflib.get_close_matches(str(names), families, 1, cutoff=0.5)))
    code = " (remote code of 'auto_map' is never run)" if values.get("auto_map") else ""
    raise UserError(f"{path}: {what} is not supported{code}{advice}; supported are {', '.join(families)}")
