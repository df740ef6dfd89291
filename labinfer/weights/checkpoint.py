"""A Hugging Face checkpoint directory: which safetensors file holds which tensor, read by range.

Files are mapped, not read as a whole: only what this rank asks for is copied, and ``bytes_read`` counts it. (The system
reads whole pages, so for narrow column slices the disk gives more than that.)
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from labinfer.errors import UserError
from labinfer.weights.files import weight_files
from labinfer.weights.source import TensorSource


class Checkpoint:
    """The tensors of a checkpoint directory.

    Raises:
        UserError: no weights there, or a file that is missing or broken.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.bytes_read = 0
        self._files = {path: _open(path) for path in weight_files(directory)}
        self._file_of: dict[str, Path] = {}
        for path, file in self._files.items():
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name in self._file_of:
                    raise UserError(
                        f"tensor {name} is both in {self._file_of[name].name} and in {path.name} of {directory}"
                    )
                self._file_of[name] = path

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def read_into(self, source: TensorSource) -> None:
        """Copy the slice a parameter needs into it, converted to its type.

        Raises:
            UserError: the tensor is missing or has another shape.
        """
        if source.name not in self._file_of:
            raise UserError(
                f"{self.directory} has no tensor {source.name} of shape {list(source.shape)}; is the checkpoint complete?"
            )
        path = self._file_of[source.name]
        view = self._files[path].get_slice(source.name)
        if tuple(view.get_shape()) != source.shape:
            raise UserError(
                f"{path}: tensor {source.name} has shape {view.get_shape()}, but the config asks for {list(source.shape)}"
            )
        data = view[:, source.begin : source.end] if source.dim == 1 else view[source.begin : source.end]
        if not data.dtype.is_floating_point:
            raise UserError(f"{path}: tensor {source.name} holds {data.dtype}; quantised checkpoints are not supported")
        self.bytes_read += data.nbytes
        source.destination.copy_(data)


def _open(path: Path):
    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path} is missing; is the checkpoint complete?") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a valid safetensors file ({error}); download it again") from None
