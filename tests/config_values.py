"""Keys that Transformers' source reads from a family's config, and other values for them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from checkpoints import CONFIGS

from labinfer.models.config_file import FULL, SLIDING

ROOT = Path(transformers.__file__).parent
SHARED = ("masking_utils.py", "cache_utils.py", "modeling_rope_utils.py")
"""Files that all families' models call with their config."""
SPECIAL: dict[str, list[Any]] = {
    "is_causal": [False],
    "layer_types": [[SLIDING] * 4, [FULL] * 4, [SLIDING] * 8, [FULL] * 8],
    "sliding_window": [5],
    "attention_chunk_size": [5],
    "per_layer_config": [{"1": {"head_dim": 20}}],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 77.0}, {"rope_type": "nothing"}],
    "rope_scaling": [{"rope_type": "linear", "factor": 3.0}],
    "rope_theta": [77.0],
    "partial_rotary_factor": [0.4, 0.125],
    "swiglu_alpha": [1.25],
    "no_rope_layers": [[1, 1, 1, 1], [0, 1, 0, 1]],
    "mlp_only_layers": [[0], [1], [3]],
    "mlp_layer_types": [["dense"] * 4],
    "topk_method": ["other"],
    "text_config": [{}],
}
"""Values for keys that have none in the config, or for which another number of the same type would not do."""


def is_config(node: ast.expr) -> bool:
    """Whether an expression is a config by its name, such as ``self.config``."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.endswith("config")


@cache
def config_reads(path: Path) -> frozenset[str]:
    """Names of public attributes that a file reads from configs; in the file of a config also from ``self`` and ``kwargs``."""
    names: set[str] = set()
    is_own = path.name.startswith("configuration_")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            is_self = is_own and isinstance(node.value, ast.Name) and node.value.id == "self"
            names |= {node.attr} if is_config(node.value) or is_self else set()
        elif isinstance(node, ast.Call) and len(node.args) > 0:
            called, first, *others = node.func, *node.args
            if isinstance(called, ast.Name) and called.id in ("getattr", "hasattr") and others:
                is_self = isinstance(first, ast.Name) and first.id == "self" and (is_own or path.name in SHARED)
                names |= (
                    {others[0].value}
                    if (is_config(first) or is_self) and isinstance(others[0], ast.Constant)
                    else set()
                )
            elif isinstance(called, ast.Attribute) and called.attr in ("pop", "get", "setdefault") and is_own:
                is_kwargs = isinstance(called.value, ast.Name) and called.value.id == "kwargs"
                names |= {first.value} if is_kwargs and isinstance(first, ast.Constant) else set()
    return frozenset(name for name in names if isinstance(name, str) and not name.startswith("_"))


def family_reads(kind: str) -> set[str]:
    """Names that the text model of a kind of checkpoint reads."""
    config = CONFIGS[kind]()
    text, models = config.get_text_config(), transformers.AutoModel._model_mapping
    model = transformers.AutoModelForCausalLM._model_mapping.get(type(text), None)
    model = model or models.get(type(text), None) or models[type(config)]
    model = model[0] if isinstance(model, tuple) else model
    files = [ROOT / name for name in SHARED] + [Path(inspect.getfile(part)) for part in (model, type(text))]
    return set().union(*map(config_reads, files)) | {"tie_word_embeddings"}


def other_values(key: str, value: Any) -> list[Any]:
    """Values of the same type, or of any where the config has none."""
    if isinstance(value, bool):
        own = [not value]
    elif isinstance(value, int):
        own = [value + 1, max(1, value // 2), 2 * value]
    elif isinstance(value, float):
        own = [1.5 * value, value / 2]
    elif isinstance(value, str):
        own = ["relu", "other"]
    else:
        own = [3, 0.5, True, "other"]
    return SPECIAL.get(key, own)


ABSENT = object()
"""Stands for a value where the config lacks the key."""
NAMES = {
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "silu"],
    "hidden_activation": ["gelu", "silu"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "scoring_func": ["softmax", "sigmoid"],
    "use_bidirectional_attention": ["all", "vision"],
}
"""Values of keys that have a few names to choose from."""
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0, "attention_factor": 1.4},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0, "alpha": 5.0},
    {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 16},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 3.0},
    {"rope_type": "yarn", "factor": 3.0},
    {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 3.0, "mscale": 0.7},
    {"rope_type": "yarn", "factor": 3.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 3.0, "partial_rotary_factor": 0.5, "truncate": False},
    {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "longrope", "factor": 3.0, "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "factor": 3.0, "original_max_position_embeddings": 4096},
    {"rope_type": "longrope", "original_max_position_embeddings": 16, "attention_factor": 1.4},
]  # fmt: skip
"""Rope parameters but for their base and the factors of ``longrope``."""
ROPE_KEYS = {
    "factor": 3.0,
    "attention_factor": 1.4,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "truncate": False,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
    "alpha": 5.0,
}
"""Values of keys of rope parameters where there are none."""

KeyPath = tuple[str, ...]


Change = dict[KeyPath, Any]
"""Path of a key → its new value, or ``ABSENT`` to drop the key."""


def changes(kind: str, values: dict[str, Any], num_frequencies: int) -> list[Change]:
    """Every change that a kind's ``config.json`` is tried with: of one key, or of rope parameters to their older spelling.

    Args:
        values: of the file as it is.
        num_frequencies: factors that ``longrope`` needs.
    """
    is_nested = "text_config" in values
    text = values["text_config"] if is_nested else values
    root: KeyPath = ("text_config",) if is_nested else ()
    found = [{root + path: value} for key in text for path, value in _changes_at((key,), text[key])]
    found += [{(key,): value} for key in values if is_nested for value in _scalars(key, values[key])]
    missing = sorted(family_reads(kind) - text.keys())
    found += [{(*root, key): value} for key in missing for value in other_values(key, None)]
    factors = {"short_factor": [1.0 + 0.1 * n for n in range(num_frequencies)]}
    factors["long_factor"] = [1.0 + 0.5 * n for n in range(num_frequencies)]
    for rope in ROPES:
        own = rope | (factors if "longrope" in rope.values() else {})
        older = {"rope_parameters": ABSENT, "rope_theta": 500.0, "rope_scaling": own}
        found.append({(*root, key): value for key, value in older.items()})
        for path, given in _dicts(("rope_parameters",), text.get("rope_parameters") or {}):
            found.append({root + path: {"rope_theta": given.get("rope_theta", 10000.0)} | own})
    for path, given in _dicts(("rope_parameters",), text.get("rope_parameters") or {}):
        found += [{(*root, *path, key): ROPE_KEYS[key]} for key in sorted(ROPE_KEYS.keys() - given.keys())]
    skipped = ("architectures", "is_causal")
    return [change for change in found if not any(path[-1] in skipped for path in change)]


def changed(values: dict[str, Any], change: Change) -> dict[str, Any]:
    """Copy of ``values`` with ``change`` applied."""
    for (key, *rest), value in change.items():
        inner = changed(values[key], {tuple(rest): value}) if rest else value
        values = {name: old for name, old in values.items() if name != key} | ({} if inner is ABSENT else {key: inner})
    return values


def _changes_at(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _changes_at((*path, key), inner)
    for other in _scalars(path[-1], value):
        yield path, other


def _scalars(key: str, value: Any) -> list[Any]:
    """Other values of one key."""
    others: list[Any] = [] if value is None else [None]
    if isinstance(value, list) and value:
        for index in {0, len(value) - 1}:
            near = [other for other in value if other != value[index]] or other_values(key, value[index])
            others.append([*value[:index], near[0], *value[index + 1 :]])
    elif not isinstance(value, dict):
        others += other_values(key, value)
        if isinstance(value, int) and not isinstance(value, bool):
            others += [value - 1]
    if isinstance(value, float) and "eps" in key:
        others.append(0.05)
    others += SPECIAL.get(key, []) + NAMES.get(key, [])
    return [*(other for other in others if other != value), ABSENT]


def _dicts(path: KeyPath, value: dict[str, Any]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Rope parameters themselves, or those of each type of layers."""
    nested = [key for key in value if isinstance(value[key], dict)]
    yield from (((*path, key), value[key]) for key in nested)
    if not nested:
        yield path, value
