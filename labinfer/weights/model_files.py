"""ModelFiles: what the files of a model say: its config, its end tokens, its weights. A kind of model files is a class of its own."""

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
    """The files of a model, registered as ``model_files`` under the ending of the file that ``--model`` names (``gguf`` for
    ``a.gguf``). Every other path is opened by the class that is registered as ``directory``.

    An object is made, and asked one question, wherever a process needs to know something of a model; nothing is read before that.
    Processes without torch make it, too: only ``has_different_head``, ``formats`` and ``open_weights`` may import torch. Every method
    may raise ``UserError`` for a file that is missing or broken.

    Args:
        path: as ``--model`` was resolved: a directory, or a file that need not be there.
    """

    def __init__(self, path: Path):
        self.path = path

    @property
    def config_path(self) -> Path:
        """The file that the config is in, for errors."""
        return self.path

    def config(self) -> dict[str, Any]:
        """Values in the form of Transformers' ``config.json``."""
        raise NotImplementedError

    def generation_config(self) -> dict[str, Any]:
        """Values in the form of ``generation_config.json``: sampling that the model's authors recommend."""
        return {}

    def end_ids(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Ids of the tokens that end an answer, each once.

        Args:
            config: of the text model, as its family reads it.
        """
        raise NotImplementedError

    def pooling(self, config: Mapping[str, Any]) -> PoolingConfig | None:
        """The vectors that an embedding model gives; None where the files do not say."""
        return None

    def weight_files(self) -> list[Path]:
        """Files that hold the weights, by their names alone; the other files of a directory are not among them."""
        return [self.path]

    def has_head(self) -> bool:
        """Whether there is an output head; True where the files cannot say. A head that is tied to the embedding counts as one."""
        return True

    def has_different_head(self, names: CheckpointNames) -> bool:
        """Whether there is an output head that is no copy of the embedding, although the config ties the two."""
        return False

    def formats(self) -> Formats:
        """The format of each matrix, known before the weights are opened. Raises ``UserError`` for one that is not supported."""
        raise NotImplementedError

    def open_weights(self) -> CheckpointReader:
        """The weights, of which nothing but headers is read."""
        raise NotImplementedError


def open_model(path: Path) -> ModelFiles:
    """The files of the model at a path."""
    kind = path.suffix[1:] if is_model_file(path) else DIRECTORY
    return REGISTRY.find(KIND, kind)(path)


def is_model_file(path: Path) -> bool:
    """Whether the path of a model is, by its name, that of a file, not of a directory."""
    return path.suffix in file_endings() and not path.is_dir()


def file_endings() -> tuple[str, ...]:
    """Endings of the names of files that are models, such as ``.gguf``."""
    return tuple(f".{name}" for name in REGISTRY.names(KIND) if name != DIRECTORY)
