"""A Hugging Face checkpoint directory: its tensors, and the format of each matrix that they store."""

from __future__ import annotations

from pathlib import Path

from labinfer.errors import UserError
from labinfer.weights.formats.format import Format
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.formats.registry import read_formats
from labinfer.weights.json_file import read_json
from labinfer.weights.slices import MatrixSlice, TensorSlice, WeightSlice
from labinfer.weights.tensor_files import PLAIN, TensorFiles


class Checkpoint(TensorFiles):
    """The tensors of a checkpoint directory, and the format of each matrix in it.

    Raises:
        UserError: as for ``TensorFiles``, or a quantisation that is not supported.
    """

    def __init__(self, directory: Path):
        config = directory / "config.json"
        self._formats = read_formats(read_json(config) if config.exists() else {}, config)
        super().__init__(directory)

    def format(self, matrix: str) -> Format:
        """The format of a matrix: plain also where it was left out of the quantisation without a word, as routers often are."""
        chosen, weight = self._formats(matrix), f"{matrix}.weight"
        names = chosen.tensor_names(matrix)
        if weight in names or weight not in self._tensors or any(name in self._tensors for name in names):
            return chosen
        return PlainFormat()

    def load(self, part: WeightSlice) -> None:
        """Read and decode a slice into its destination.

        Raises:
            UserError: a tensor is missing, or has another shape or an unsuitable dtype.
        """
        if isinstance(part, TensorSlice):
            self.read_into(part)
        elif (stacked := self._from_stack(part)) is not None:
            self.read_into(stacked)
        else:
            self.format(part.name).read(self, part)

    def check(self, part: WeightSlice) -> None:
        """Refuse what ``load`` would refuse by name, shape or dtype, and codes that contradict the config.

        Raises:
            UserError: as for ``load``.
        """
        tensor = part if isinstance(part, TensorSlice) else self._from_stack(part)
        if tensor is None:
            self.format(part.name).check(self, part)
        else:
            self.expect(tensor.name, tensor.shape, tensor.destination.dtype)

    def _from_stack(self, part: MatrixSlice) -> TensorSlice | None:
        """The slice of a tensor that holds many matrices; None where this one has tensors of its own.

        Raises:
            UserError: the tensor is quantised.
        """
        if part.stack is None or part.stack.name not in self._tensors:
            return None
        tensor = self._tensors[part.stack.name]
        if tensor.dtype not in PLAIN:
            raise UserError(
                f"{tensor.path}: tensor {part.stack.name} holds {tensor.dtype}; experts in one tensor are read in "
                f"{', '.join(PLAIN)} only, quantised ones in tensors of their own"
            )
        return part.from_stack()

    def tensor_names(self, part: WeightSlice) -> tuple[str, ...]:
        """Names of the tensors that a slice may be read from."""
        if isinstance(part, TensorSlice):
            return (part.name,)
        names = self.format(part.name).tensor_names(part.name)
        return names if part.stack is None else (*names, part.stack.name)
