"""Pooling of an embedding model, from the files of sentence-transformers. Does not import torch.

Source: sentence-transformers 6.2, ``modules.json`` and the ``config.json`` of its ``Pooling`` module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from labinfer.base.errors import UserError
from labinfer.base.pooling import PoolingConfig
from labinfer.weights.json_file import read_list, read_optional

MODULES_FILE, PROMPTS_FILE = "modules.json", "config_sentence_transformers.json"
SUPPORTED = ("Transformer", "Pooling", "Normalize")
"""Supported module classes, in the only supported order; the last one is optional."""
NEUTRAL = (
    (0, "sentence_bert_config.json", "do_lower_case", False),
    (2, "config.json", "module_input_name", "sentence_embedding"),
)
"""Keys of which one value is supported: for each, the index of the module, the name of its file, the key and the value."""
MODES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""Names in ``plan.POOLINGS`` of the supported pooling modes of sentence-transformers."""
OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of pooling modes in files of sentence-transformers before 5.4, in the order in which vectors of several modes are
concatenated."""


def read_pooling(model: Path) -> PoolingConfig | None:
    """Pooling that ``modules.json`` describes; None if there is no such file.

    Raises:
        UserError: a file is invalid.
    """
    path = model / MODULES_FILE
    if not path.exists():
        return None
    modules, kinds = _read_modules(path)
    if kinds not in (list(SUPPORTED[:2]), list(SUPPORTED)):
        known = ", ".join(SUPPORTED)
        return PoolingConfig(refusal=f"{path} asks for {', '.join(kinds)}; supported are {known} in this order")
    folders = [_inside(model, path, module) for module in modules]
    for folder, name, key, expected in NEUTRAL:
        if folder < len(folders) and (value := read_optional(folders[folder] / name).get(key)) not in (None, expected):
            return PoolingConfig(
                refusal=f"{folders[folder] / name} asks for {key} {value!r:.60}, which is not supported"
            )
    pooling = _read_module(folders[1] / "config.json", normalize=len(kinds) > 2)
    values = read_optional(model / PROMPTS_FILE)
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise UserError(f"{model / PROMPTS_FILE}: prompts should be texts by name, not {prompts!r:.80}")
    return replace(pooling, default_prompt=str(values.get("default_prompt_name") or ""), prompts=prompts)


def module_folders(model: Path) -> dict[str, Path]:
    """Folder of the settings of each module in ``modules.json``, by the name of its class; empty without that file.

    Raises:
        UserError: the file is invalid.
    """
    path = model / MODULES_FILE
    modules, kinds = _read_modules(path) if path.exists() else ([], [])
    return {kind: _inside(model, path, module) for kind, module in zip(kinds, modules, strict=True)}


def _read_modules(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Entries of ``modules.json``, and the class name of each."""
    modules = read_list(path)
    if not all(isinstance(module, dict) for module in modules):
        raise UserError(f"{path} should be a list of objects, not {modules!r:.60}")
    return modules, [str(module.get("type")).rpartition(".")[2] for module in modules]


def _inside(model: Path, path: Path, module: dict[str, Any]) -> Path:
    """Folder with the settings of ``module``, an entry of ``modules.json``.

    Args:
        model: checkpoint directory.
        path: path of ``modules.json``, for errors.

    Raises:
        UserError: ``module["path"]`` does not name a folder in ``model``.
    """
    name = module.get("path", "")
    if not isinstance(name, str) or "\0" in name or (name and Path(name).name != name):
        raise UserError(f"{path}: path should name a folder in the same directory, not {name!r:.60}")
    return model / name


def _read_module(path: Path, *, normalize: bool) -> PoolingConfig:
    """Pooling by the ``config.json`` of a ``Pooling`` module."""
    values = read_optional(path)
    given = values.get("pooling_mode")
    modes = [mode for key, mode in OLD_KEYS.items() if values.get(key)] if given is None else given
    modes = [modes] if isinstance(modes, str) else modes or ["mean"]
    if not isinstance(modes, list) or len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in MODES:
        what = modes if isinstance(modes, str) else " with ".join(map(str, modes)) if isinstance(modes, list) else modes
        return PoolingConfig(refusal=f"{path} asks for pooling {what!s:.80}, which is not supported")
    if values.get("include_prompt") is False and modes != ["lasttoken"]:
        return PoolingConfig(refusal=f"{path} asks for include_prompt false, which is not supported")
    return PoolingConfig(pooling=MODES[modes[0]], normalize=normalize, is_embedder=True)
