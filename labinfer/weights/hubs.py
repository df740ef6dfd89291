"""Hub: a site from which models are downloaded by id (Hugging Face or ModelScope), through its own client library."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from labinfer.base.errors import UserError
from labinfer.weights.files import weight_files

SETTINGS, WEIGHTS = ("*.json", "tokenizer.model", "*.jinja"), ("*.safetensors",)
"""Patterns of the files that are downloaded from a hub: configs and tokenizer, and weights."""
CONFIG = "config.json"
HUGGING_FACE = "https://huggingface.co"
"""URL of the Hugging Face hub unless ``$HF_ENDPOINT`` sets a mirror."""
MODELSCOPE_IDS = {
    "meta-llama/Llama-2-7b-chat-hf": "modelscope/Llama-2-7b-chat-ms",
    "meta-llama/Meta-Llama-3-8B-Instruct": "LLM-Research/Meta-Llama-3-8B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct": "LLM-Research/Llama-3.2-1B-Instruct",
}
"""ModelScope's ids of models that have another id on the Hugging Face hub, for the aliases of ``resolve.py``."""


class Hub:
    """Base class of the hubs. The first call imports the hub's client library: importing is slow, and most runs name a
    directory."""

    title: str
    elsewhere: str
    """Advice for error messages if the hub cannot be reached."""
    token_variable: str
    """Environment variable from which the client reads the user's access token."""
    cache_variable: str
    """Environment variable that sets the folder of the client's cache."""

    def repository(self, model_id: str) -> str:
        """Id of a model on this hub, from its id on the Hugging Face hub."""
        return model_id

    def cached(self, repository: str) -> Path:
        """Directory of a model in the cache of the client library. Accesses no network.

        Raises:
            UserError: the client is not installed.
            Exception: a file of the model is not in the cache; each client raises its own errors.
        """
        raise NotImplementedError

    def download(self, repository: str) -> Path:
        """Download the missing files of a model into the cache of the client library. Returns the model's directory.

        Raises:
            Exception: whatever the client or its HTTP library raises.
        """
        raise NotImplementedError

    def advice(self, error: BaseException) -> str:
        """Advice to the user about an ``error`` of ``download``; empty if the hub has no such model."""
        status = getattr(getattr(error, "response", None), "status_code", None)
        if is_disk_full(error):
            return f"the disk of the download cache is full: free space on it, or set ${self.cache_variable} to a folder on another disk"
        if status == 401:  # the Hugging Face hub gives this answer for unknown models, too, to hide private ones
            return (
                f"check the spelling of the id; if the model is private or gated, set ${self.token_variable} to a valid token that may "
                "read it"
            )
        if status == 403:
            return f"if the model is private or gated, set ${self.token_variable} to a token that may read it"
        if status is None or status >= 500:
            return self.unreachable_advice()
        return ""

    def unreachable_advice(self) -> str:
        """Advice to the user if this hub cannot be reached."""
        return f"if the {self.title} cannot be reached from here, {self.elsewhere}"

    def offline_advice(self) -> str:
        """Advice to the user about a model that is not in the cache, if the client must not access the network; empty if it may."""
        return ""


class HuggingFaceHub(Hub):
    """The Hugging Face hub, or the mirror that ``$HF_ENDPOINT`` names."""

    title = "Hugging Face hub"
    elsewhere = "set HF_ENDPOINT=https://hf-mirror.com for a mirror, add --hub modelscope for ModelScope, or give a local directory"
    token_variable = "HF_TOKEN"
    cache_variable = "HF_HOME"
    metadata_timeout_seconds = 5.0

    def cached(self, repository: str) -> Path:
        return _complete(self._snapshot(repository, local_files_only=True))

    def download(self, repository: str) -> Path:
        return self._snapshot(repository, local_files_only=False)

    def _snapshot(self, repository: str, local_files_only: bool) -> Path:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                repository,
                allow_patterns=[*SETTINGS, *WEIGHTS],
                local_files_only=local_files_only,
                etag_timeout=self.metadata_timeout_seconds,
            )
        )

    def advice(self, error: BaseException) -> str:
        from huggingface_hub.errors import HFValidationError

        return "" if isinstance(error, HFValidationError) else super().advice(error)

    def unreachable_advice(self) -> str:
        from huggingface_hub.constants import ENDPOINT

        if ENDPOINT == HUGGING_FACE:
            return super().unreachable_advice()
        return (
            f"if {ENDPOINT} (set by $HF_ENDPOINT) cannot be reached from here, set another mirror, add --hub modelscope for "
            "ModelScope, or give a local directory"
        )

    def offline_advice(self) -> str:
        from huggingface_hub.constants import HF_HUB_OFFLINE

        if not HF_HUB_OFFLINE:
            return ""
        return "$HF_HUB_OFFLINE is set: unset it to download the model, or give a local directory"


class ModelScopeHub(Hub):
    """ModelScope, or the server that ``$MODELSCOPE_ENDPOINT`` names. The client library is ``modelscope_hub``. ``modelscope``,
    which uses it, would import Transformers and torch."""

    title = "ModelScope hub"
    elsewhere = "add --hub huggingface (with HF_ENDPOINT=https://hf-mirror.com for a mirror), or give a local directory"
    token_variable = "MODELSCOPE_API_TOKEN"
    cache_variable = "MODELSCOPE_CACHE"

    def repository(self, model_id: str) -> str:
        return MODELSCOPE_IDS.get(model_id, model_id)

    def cached(self, repository: str) -> Path:
        return _complete(self._snapshot(repository, [*SETTINGS, *WEIGHTS], local_files_only=True))

    def download(self, repository: str) -> Path:
        # Weights come last: from the client's cache alone one cannot tell which files an interrupted download lacks.
        self._snapshot(repository, [*SETTINGS], local_files_only=False)
        return self._snapshot(repository, [*WEIGHTS], local_files_only=False)

    def _snapshot(self, repository: str, patterns: list[str], local_files_only: bool) -> Path:
        try:
            from modelscope_hub.compat import snapshot_download
        except ImportError:
            raise UserError(
                '--hub modelscope needs the package modelscope-hub, which is not installed; pip install "labinfer[modelscope]"'
            ) from None
        logging.getLogger("modelscope_hub").setLevel(logging.WARNING)  # each rank reports the cache folder itself
        return Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=local_files_only))


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error of a download, or an error that caused it, says that the disk is full, by its errno or its text (some
    clients keep only the text)."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _complete(directory: Path) -> Path:
    """``directory`` if it has a config and all weight files.

    Raises:
        FileNotFoundError: a file is missing, as a download was interrupted.
    """
    try:
        paths = [directory / CONFIG, *weight_files(directory)]
    except UserError as error:
        raise FileNotFoundError(str(error)) from error
    if missing := [path for path in paths if not path.exists()]:
        raise FileNotFoundError(missing[0])
    return directory


HUBS: dict[str, Hub] = {"huggingface": HuggingFaceHub(), "modelscope": ModelScopeHub()}
"""The hubs by the names of ``--hub``."""


def find_hub(name: str) -> Hub:
    """The hub called ``name``.

    Raises:
        UserError: there is no such hub. The message names $LABINFER_HUB, as the value of ``--hub`` has been checked before.
    """
    if name not in HUBS:
        raise UserError(f"LABINFER_HUB={name!r} is not a hub: set it to one of {', '.join(HUBS)}, or unset it")
    return HUBS[name]
