"""PlainFormat: unquantized matrices, stored as one floating-point tensor ``.weight`` (outputs, inputs)."""

from __future__ import annotations

from labinfer.base.errors import UserError
from labinfer.weights.codes import Codes
from labinfer.weights.formats.format import Formats, TensorReader
from labinfer.weights.slices import MatrixSlice, TensorSlice


class PlainFormat:
    """Storage format of unquantized matrices; see ``Format``."""

    def form(self, quantization: str) -> None:
        return None

    def tensor_names(self, matrix: str) -> tuple[str, ...]:
        return (f"{matrix}.weight",)

    def check(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        if isinstance(matrix.destination, Codes):
            raise UserError(
                f"tensor {matrix.name}.weight is not quantized, but quantization_config in config.json does not "
                "exclude it; exclude it there, or give --quantization none"
            )
        tensors.expect(f"{matrix.name}.weight", (matrix.outputs, matrix.inputs), matrix.destination.dtype)

    def read(self, tensors: TensorReader, matrix: MatrixSlice) -> None:
        tensors.read_into(
            TensorSlice(
                name=f"{matrix.name}.weight",
                shape=(matrix.outputs, matrix.inputs),
                ranges=(matrix.rows, matrix.columns),
                destination=matrix.destination,
            )
        )


def plain_formats() -> Formats:
    """Formats of a checkpoint without quantized matrices: ``PlainFormat`` for all."""
    plain = PlainFormat()
    return Formats(lambda matrix: plain)
