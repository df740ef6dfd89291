"""StackedCheckpoint: a checkpoint directory that may store all experts of a layer in one tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from labinfer.base.errors import UserError
from labinfer.weights.checkpoint import Checkpoint
from labinfer.weights.formats.format import Format, Formats, TensorReader
from labinfer.weights.formats.mxfp4 import Mxfp4Format
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.formats.transposed import InputMajorFormat, TransposedFormat
from labinfer.weights.hugging_face.stack import StackReader, stacked_names
from labinfer.weights.slices import MatrixSlice, WeightSlice
from labinfer.weights.tensor_files import PLAIN


class StackedCheckpoint(Checkpoint):
    """``Checkpoint`` in which an expert's matrix may be stored in a stack: one tensor with the matrices of all experts of a
    layer."""

    def __init__(self, directory: Path, formats: Formats):
        self._names_of_stacks: dict[str, tuple[str, ...]] = {}
        super().__init__(directory, formats)

    def source(self, part: MatrixSlice) -> tuple[Format, TensorReader, MatrixSlice]:
        """Format of a matrix, the reader of its tensors, and the slice under the name by which this reader knows the matrix. If the
        files have the matrix's stack, the reader reads from it.

        Raises:
            UserError: a stack is quantized, but the config does not say how.
        """
        chosen = self.format(part.name)
        if part.stack is None or self._tensors.keys().isdisjoint(self._stacked_names(part)):
            return chosen, self, part
        stack, tensors = part.stack.name, StackReader(self, part)
        weight = self._tensors.get(tensors.stored_name(f"{stack}.weight"))
        if part.stack.is_transposed:  # no other format supports alternating rows of two projections
            if weight is not None and weight.dtype in PLAIN:
                return TransposedFormat(), self, part
            if isinstance(chosen, Mxfp4Format):
                return chosen, self, part
            raise UserError(
                f"{self.directory}: the experts in tensor {stack} are neither in {', '.join(PLAIN)} nor in MXFP4 "
                "according to config.json; only these are supported"
            )
        if weight is not None and part.stack.may_be_input_major and self._is_input_major(part, weight.shape):
            if weight.dtype in PLAIN:
                return InputMajorFormat(), self, part
            raise UserError(
                f"{self.directory}: the experts in tensor {stack} are input-major in {weight.dtype}; only {', '.join(PLAIN)} "
                "are supported in this order; use the checkpoint in bfloat16, with -q int8 for example"
            )
        if weight is not None and weight.dtype in PLAIN:
            chosen = PlainFormat()
        elif isinstance(chosen, PlainFormat):
            dtype = "codes" if weight is None else weight.dtype
            raise UserError(
                f"{self.directory}: the experts in tensor {stack} are stored in {dtype}, and quantization_config "
                f"in config.json does not describe it; without it only {', '.join(PLAIN)} are supported"
            )
        return chosen, tensors, replace(part, name=stack)

    def _is_input_major(self, part: MatrixSlice, shape: tuple[int, ...]) -> bool:
        """Whether a stack of ``shape`` is (count, inputs, outputs).

        Raises:
            UserError: outputs and inputs are equally many, so that the shape does not tell.
        """
        count, outputs, inputs = part.stack.shape
        if tuple(shape) != (count, inputs, outputs):
            return False
        if outputs == inputs:
            raise UserError(
                f"{self.directory}: tensor {part.stack.name} of shape {list(shape)} may be input-major (as published) or output-major (of "
                "Transformers 5), as both sizes are equal; store each expert's matrices apart (experts.0.gate_proj.weight ...)"
            )
        return True

    def tensor_names(self, part: WeightSlice) -> tuple[str, ...]:
        """Names of the tensors from which a slice may be read: its own tensors, and for a matrix those of its stack."""
        names = super().tensor_names(part)
        is_stacked = isinstance(part, MatrixSlice) and part.stack is not None
        return (*names, *self._stacked_names(part)) if is_stacked else names

    def _stacked_names(self, part: MatrixSlice) -> tuple[str, ...]:
        """Names of the tensors of a matrix's stack. The format of the matrix is also that of its stack."""
        stack = part.stack.name
        if stack not in self._names_of_stacks:
            own = self._formats(part.name).tensor_names(part.name)
            suffixes = ("weight", *(name.removeprefix(f"{part.name}.") for name in own))
            self._names_of_stacks[stack] = tuple(name for suffix in suffixes for name in stacked_names(stack, suffix))
        return self._names_of_stacks[stack]
