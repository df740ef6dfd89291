"""resolve_model: finds a model by name among the bundled ones, by path, in $LABINFER_MODEL_DIR, in the cache of a hub, or on the
hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from labinfer.base.config import DEFAULT_HUB
from labinfer.base.errors import UserError, first_line
from labinfer.base.standard_error import write_error
from labinfer.weights.hubs import Hub, find_hub
from labinfer.weights.model_files import file_endings, is_model_file, open_model

BUNDLED = ("demo", "demo-draft")
"""Models in ``labinfer/assets``. A bundled name takes precedence over a directory; write ``./demo`` for the directory."""


class HubModel(NamedTuple):
    """A model on the Hugging Face hub."""

    id: str
    gigabytes: float
    """Size of the files that are downloaded, in units of 10^9 bytes."""


ALIASES = {
    "qwen2": HubModel("Qwen/Qwen2-0.5B-Instruct", 1.0),
    "qwen2-1.5b": HubModel("Qwen/Qwen2-1.5B-Instruct", 3.1),
    "qwen2-7b": HubModel("Qwen/Qwen2-7B-Instruct", 15.2),
    "qwen2.5": HubModel("Qwen/Qwen2.5-0.5B-Instruct", 1.0),
    "qwen2.5-1.5b": HubModel("Qwen/Qwen2.5-1.5B-Instruct", 3.1),
    "qwen2.5-7b": HubModel("Qwen/Qwen2.5-7B-Instruct", 15.2),
    "qwen3": HubModel("Qwen/Qwen3-0.6B", 1.5),
    "qwen3-4b": HubModel("Qwen/Qwen3-4B", 8.0),
    "qwen3-8b": HubModel("Qwen/Qwen3-8B", 16.4),
    "llama2": HubModel("meta-llama/Llama-2-7b-chat-hf", 13.5),
    "llama3": HubModel("meta-llama/Meta-Llama-3-8B-Instruct", 16.1),
    "llama3.2": HubModel("meta-llama/Llama-3.2-1B-Instruct", 2.5),
}
"""Models by their aliases, short names that ``--model`` accepts."""
WITHOUT_MODEL = "; without a model at hand, leave --model out for the bundled one, or write one with random weights by tools/random_checkpoint.py"
"""Advice in error messages about a model that is not found."""


def resolve_model(name: str, model_dir: str, may_download: bool, hub: str = DEFAULT_HUB) -> Path:
    """Path of a model's directory or file.

    Args:
        name: model name or path, as given by the user.
        model_dir: $LABINFER_MODEL_DIR, or empty.
        may_download: whether this process may download from the hub (one process of each node may).
        hub: name of the hub whose cache is searched, and that the model is downloaded from.

    Raises:
        UserError: the model is not found; the message lists all places that were tried.
    """
    directory, tried = find_directory(name, model_dir)
    return directory or _from_hub(find_hub(hub), name, may_download, tried)


def find_here(name: str, model_dir: str, hub: str = DEFAULT_HUB) -> Path | None:
    """Path of a model on this machine or in the hub's cache on it; None if the model must be downloaded.

    Raises:
        UserError: the model is not found, and the hub cannot have it or must not be accessed ($HF_HUB_OFFLINE).
    """
    try:
        return resolve_model(name, model_dir, may_download=False, hub=hub)
    except UserError:
        if find_hub(hub).offline_advice():
            raise
        return None


def find_directory(name: str, model_dir: str) -> tuple[Path | None, list[str]]:
    """Path of the model ``name``: a bundled name, a path, or a name in ``model_dir``. Also returns the places that were tried. The
    path is None if only a hub, or the hub's cache, may have the model; neither is searched, as that is slow.

    Raises:
        UserError: the model is not found, and the hub cannot have it.
    """
    if name in BUNDLED:
        return Path(__file__).parent.parent / "assets" / name, []
    is_file = name.endswith(file_endings())
    tried = [f"{'file' if is_file else 'directory'} {name}"]
    if _is_model(name):
        return Path(name), tried
    if os.path.exists(name):
        raise UserError(
            f"--model {name} is a file; give the directory that holds config.json and the safetensors files, or a {' or '.join(file_endings())} file"
        )
    if model_dir:
        for candidate in dict.fromkeys((name, _hub_id(name), _hub_id(name).rpartition("/")[2])):
            path = Path(model_dir) / candidate
            if _is_model(path):
                return path, tried
            tried.append(f"{'file' if is_file else 'directory'} {path}")
    else:
        tried.append("$LABINFER_MODEL_DIR (not set)")
    repository = _hub_id(name)
    if repository.count("/") == 1 and not repository.startswith(("/", ".", "~")):
        return None, tried
    if "/" not in name and not is_file:
        sizes = [f"{alias} ({model.gigabytes} GB)" for alias, model in ALIASES.items()]
        tried.append(f"name {name} (known: {', '.join((*BUNDLED, *sizes))})")
    raise UserError(f"--model {name} was not found; tried: {'; '.join(tried)}{WITHOUT_MODEL}")


def _hub_id(name: str) -> str:
    """Hugging Face id of the alias ``name``; ``name`` itself if it is no alias."""
    return ALIASES[name].id if name in ALIASES else name


def _is_model(path: str | Path) -> bool:
    """Whether a path is a directory, or a file of a registered kind. Returns False for invalid names, for which Path's methods
    raise.

    Raises:
        UserError: the path is that of a split file, but not the first.
    """
    if os.path.isdir(path):
        return True
    return os.path.exists(path) and is_model_file(Path(path)) and bool(open_model(Path(path)).weight_files())


def _from_hub(hub: Hub, name: str, may_download: bool, tried: list[str]) -> Path:
    repository = hub.repository(_hub_id(name))
    try:
        return hub.cached(repository)
    except UserError as error:
        raise UserError(f"--model {name}: {error}") from None
    except Exception:  # noqa: BLE001 - each client raises its own errors
        tried.append(f"cache of the {hub.title} for {repository}")
    advice = hub.offline_advice()
    if may_download and not advice:
        size = f" ({ALIASES[name].gigabytes} GB)" if name in ALIASES else ""
        write_error(f"labinfer: {repository}{size} is not in the cache; asking the {hub.title} for it\n")
        try:
            return hub.download(repository)
        except Exception as error:  # noqa: BLE001 - the clients raise whatever their HTTP libraries do
            tried.append(f"{hub.title} for {repository} ({first_line(error):.80})")
            advice = hub.advice(error)
    raise UserError(f"--model {name} was not found; tried: {'; '.join(tried)}{advice and f'; {advice}'}{WITHOUT_MODEL}")
