"""A weight format that nobody has published: rows of int8, each with a scale.

    python launch.py --model DIR --plugin examples/plugins/int8_rows.py --prompt "17 + 25 = ?"

reads a checkpoint whose config.json has ``"quantization_config": {"quant_method": "int8_rows"}``. A matrix is stored as ``NAME.int8``,
(outputs, inputs), and ``NAME.scale``, float32, (outputs,), and is decoded while loading. Matrices in ``modules_to_not_convert`` are stored as
``NAME.weight``. The format works with any family; for a plugin's family, repeat ``--plugin``.
"""

import torch

from labinfer import register
from labinfer.weights.formats.plain import PlainFormat


class Int8Rows:
    """``labinfer.weights.formats.format.Format``: how a slice of a matrix is read."""

    def form(self, quantization):
        return None  # weights are held as floats, or as --quantization says

    def tensor_names(self, matrix):
        return f"{matrix}.int8", f"{matrix}.scale"

    def check(self, tensors, matrix):
        """Refuse what is missing or of another shape before anything is loaded."""
        tensors.expect(f"{matrix.name}.int8", (matrix.outputs, matrix.inputs), torch.int8)
        tensors.expect(f"{matrix.name}.scale", (matrix.outputs,), torch.float32)

    def read(self, tensors, matrix):
        """Only this rank's rows and columns are read."""
        shape = (matrix.outputs, matrix.inputs)
        rows_OI = tensors.read(f"{matrix.name}.int8", shape, (matrix.rows, matrix.columns), torch.int8)
        scale_O = tensors.read(f"{matrix.name}.scale", shape[:1], (matrix.rows,), torch.float32)
        matrix.destination.copy_(rows_OI * scale_O[:, None])


@register("weight_format", "int8_rows")
def read_int8_rows(settings):
    """The format of each matrix, by its name."""
    plain, rows, left_out = PlainFormat(), Int8Rows(), settings.names("modules_to_not_convert")
    return lambda matrix: plain if matrix in left_out else rows
