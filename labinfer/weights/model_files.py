"""ModelFiles: interface to a model's files (config, end tokens, weights), with a class for directories and for each kind of file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labinfer.base.pooling import PoolingConfig
from labinfer.base.registry import REGISTRY

if TYPE_CHECKING:
    from labinfer.weights.checkpoint import CheckpointReader
    from labinfer.weights.checkpoint_names import CheckpointNames
    from labinfer.weights.formats.format import Formats

KIND, DIRECTORY = "model_files", "directory"


class ModelFiles:
    """Files of a model. A class is registered as ``model_files`` under the suffix of the file that ``--model`` names (``gguf`` for
    ``a.gguf``); directories and all other paths use the class registered as ``directory``.

    Creating an object reads nothing. Processes without torch use objects, too, so only ``has_different_head``, ``formats`` and
    ``open_weights`` may import torch. Every method may raise ``UserError`` for a file that is missing or invalid.

    Args:
        path: resolved ``--model``: a directory, or a file that need not exist.
    """

    def __init__(self, path: Path):
        self.path = path

    @property
    def config_path(self) -> Path:
        """File that contains the config, for errors."""
        return self.path

    def config(self) -> dict[str, Any]:
        """Config in the format of Transformers' ``config.json``."""
        raise NotImplementedError

    def generation_config(self) -> dict[str, Any]:
        """Values in the format of ``generation_config.json``: sampling parameters that the model's authors recommend."""
        return {}

    def end_ids(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Ids of the tokens that end a generation, without duplicates.

        Args:
            config: config of the text model, as its family reads it.
        """
        raise NotImplementedError

    def pooling(self, config: Mapping[str, Any]) -> PoolingConfig | None:
        """Pooling of an embedding model; None if the files do not define any."""
        return None

    def weight_files(self) -> list[Path]:
        """Paths of the weight files, without the other files of a directory. Finds them by name and does not open them."""
        return [self.path]

    def has_head(self) -> bool:
        """Whether the model has an LM head, one of its own or the tied embedding. True if the files cannot be read."""
        return True

    def has_different_head(self, names: CheckpointNames) -> bool:
        """Whether the model has an LM head that is not a copy of the embedding, although the config ties the two."""
        return False

    def formats(self) -> Formats:
        """Format of each matrix, without opening the weights. Raises ``UserError`` for an unsupported format."""
        raise NotImplementedError

    def open_weights(self) -> CheckpointReader:
        """Open the weights. Reads only file headers."""
        raise NotImplementedError


def open_model(path: Path) -> ModelFiles:
    """The files of the model at a path, by its kind; reads nothing."""
    kind = path.suffix[1:] if is_model_file(path) else DIRECTORY
    return REGISTRY.find(KIND, kind)(path)


def is_model_file(path: Path) -> bool:
    """Whether the path of a model names a file, judging by its suffix, and not a directory."""
    return path.suffix in file_endings() and not path.is_dir()


def file_endings() -> tuple[str, ...]:
    """Suffixes of model files, such as ``.gguf``."""
    return tuple(f".{name}" for name in REGISTRY.names(KIND) if name != DIRECTORY)
