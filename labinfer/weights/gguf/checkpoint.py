"""GgufCheckpoint: weights of a GGUF file, read by ranges, with the tensor names and row order of the Hugging Face checkpoint that
was converted to GGUF.

Rows are read and decoded a few at a time, so that no tensor or slice is ever held decoded as a whole.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from labinfer.base.errors import UserError
from labinfer.weights.codes import Codes, Range, row_chunks
from labinfer.weights.formats.format import Formats, MatrixForm
from labinfer.weights.formats.settings import spellings
from labinfer.weights.gguf.blocks import decode_values
from labinfer.weights.gguf.config import gguf_config
from labinfer.weights.gguf.family import GgufFamily, Halves
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.forms import GgufForm, make_formats, put_codes, take
from labinfer.weights.gguf.header import GgufTensor
from labinfer.weights.gguf.joins import JOINS, Joined, halves
from labinfer.weights.gguf.orders import Order, RotatedPairs, TiledHeads
from labinfer.weights.gguf.registry import read_family
from labinfer.weights.loading import LoadFunctions
from labinfer.weights.slices import MatrixSlice, TensorSlice, WeightSlice
from labinfer.weights.tensor_files import SHORTEST_GAP

CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the config rather than the weights: scaling factors of RoPE frequencies."""


def gguf_formats(path: Path) -> Formats:
    """Form in memory of each matrix of the GGUF file at ``path``.

    Raises:
        UserError: the file cannot be read.
    """
    file = GgufFile(path)
    contents = _Contents(file)

    def find(matrix: str) -> tuple[GgufTensor, int] | None:
        for name in spellings(matrix):
            if (tensor := contents.tensors.get(f"{_stack(name)}.weight")) is not None:
                order = contents.column_orders.get(_name_in_layer(name))
                return tensor, order.size if isinstance(order, TiledHeads) else 0
        return None

    return make_formats(file, find)


class _Contents:
    """Tensors of a GGUF file by Hugging Face name, and row orders and value changes of modules by their name in a layer."""

    def __init__(self, file: GgufFile):
        _, family = read_family(file)
        config = gguf_config(file)
        num_layers = config["num_hidden_layers"]
        stored = {name: tensor for name, tensor in file.tensors.items() if name not in CONFIG_TENSORS}
        for fused in family.halves:
            _split_halves(fused, stored, config.get(fused.count, 0))
        self.tensors = {family.name(name, num_layers): tensor for name, tensor in stored.items()}
        self.joined = _join(family, self.tensors, num_layers)
        orders = _make_orders(config)
        self.orders = {module: orders[name] for module, name in family.orders.items()}
        self.column_orders = {module: orders[name] for module, name in family.column_orders.items()}
        self.changes = {module: CHANGES[name] for module, name in family.changes.items()}


class GgufCheckpoint:
    """Weights of a GGUF file; see ``CheckpointReader``.

    Raises:
        UserError: the file cannot be read, or its architecture is not supported.
    """

    def __init__(self, path: Path):
        self.directory = path
        self.functions = LoadFunctions()
        self.bytes_read = 0
        contents = _Contents(GgufFile(path))
        self._tensors, self._joined, self._changes = contents.tensors, contents.joined, contents.changes
        self._orders, self._column_orders = contents.orders, contents.column_orders

    @property
    def names(self) -> set[str]:
        return {*self._tensors, *self._joined}

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._tensors.get(name) or self._joined.get(name)
        return None if stored is None else stored.shape

    def read(self, name: str, shape: tuple[int, ...], ranges: tuple[Range, ...], dtype: torch.dtype) -> torch.Tensor:
        """Read part of a tensor that is not a matrix; see ``TensorReader``."""
        sizes = [end - begin for begin, end in ranges]
        destination = torch.empty((*sizes, *shape[len(sizes) :]), dtype=dtype, device="cpu")
        self.load(TensorSlice(name=name, shape=shape, ranges=ranges, destination=destination))
        return destination

    def format(self, matrix: str) -> MatrixForm:
        return GgufForm()

    def tensor_names(self, part: WeightSlice) -> tuple[str, ...]:
        return (self._name(part),)

    def is_plain(self, matrix: MatrixSlice) -> bool:
        return False

    def check(self, part: WeightSlice) -> None:
        """Check that the tensor of a slice exists and has the shape that the metadata implies."""
        name = self._name(part)
        shape = part.shape if isinstance(part, TensorSlice) else (part.outputs, part.inputs)
        if isinstance(part, MatrixSlice) and _is_in_stack(part):
            shape = (part.stack.shape[0], *shape)
        stored = self.shape(name)
        if stored is None:
            raise UserError(f"{self.directory} has no tensor for {name} of shape {list(shape)}; is the model complete?")
        if _without_ones(stored) != _without_ones(shape):
            tensor = self._tensors.get(name) or self._joined[name].first
            raise UserError(
                f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}, but the metadata implies "
                f"{list(shape)}"
            )

    def load(self, part: WeightSlice) -> None:
        """Read a slice in the row order of the Hugging Face checkpoint, dequantize it if needed, and store it in its
        destination."""
        self.check(part)
        if (joined := self._joined.get(self._name(part))) is not None:
            self._load_joined(joined, part)
            return
        if isinstance(part, TensorSlice):
            self._load_tensor(part)
            return
        tensor, module = self._tensors[self._name(part)], _name_in_layer(part.name)
        begin, destination = part.rows[0], part.destination
        rows_before = part.stack.index * part.outputs if _is_in_stack(part) else 0
        columns = _stored(self._column_orders.get(module), _whole_groups(part))
        for first, last in row_chunks(*part.rows, len(columns)) if len(columns) else ():
            rows = _stored(self._orders.get(module), (first, last)) + rows_before
            if isinstance(destination, Codes):
                blocks, places = self._blocks(tensor, rows, columns)
                put_codes(tensor.type, blocks, places, destination.rows(first - begin, last - begin))
            else:
                destination[first - begin : last - begin].copy_(self._values(tensor, rows, columns))

    def _load_tensor(self, part: TensorSlice) -> None:
        """Load a tensor that is small enough to be read as a whole."""
        tensor, module = self._tensors[part.name], _name_in_layer(part.name)
        rows, columns = torch.arange(math.prod(tensor.shape[:-1])), torch.arange(tensor.shape[-1])
        values = self._values(tensor, rows, columns).view(part.shape)
        if module in self._changes:
            values = self._changes[module](values)
        if module in self._orders:
            values = values[self._orders[module].stored(0, len(values))]
        part.destination.copy_(values[tuple(slice(*limits) for limits in part.ranges)])

    def _load_joined(self, joined: Joined, part: WeightSlice) -> None:
        """Load part of a tensor that the GGUF file stores in two parts, dequantized."""
        if isinstance(part, MatrixSlice):
            rows, columns = part.rows, part.columns
        else:
            rows, columns = (*part.ranges, *((0, size) for size in part.shape[len(part.ranges) :]))
        for first, last in row_chunks(*rows, joined.shape[1]):
            values = joined.rows(self._values, first, last)[:, slice(*columns)]
            part.destination[first - rows[0] : last - rows[0]].copy_(values)

    def _values(self, tensor: GgufTensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Values of a tensor, float32, at ``rows`` and ``columns`` (indices in the GGUF file)."""
        blocks, places = self._blocks(tensor, rows, columns)
        values = decode_values(tensor.type, blocks.reshape(-1, tensor.type.num_bytes))
        return take(values.view(len(rows), -1), places)

    def _blocks(
        self, tensor: GgufTensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks of ``rows`` that span ``columns``, (rows, blocks, bytes) uint8, and the positions of ``columns`` in these blocks.

        Raises:
            UserError: the file has been truncated, or cannot be read.
        """
        size, num_bytes, stride = tensor.type.size, tensor.type.num_bytes, tensor.row_bytes
        first = int(columns.min()) // size
        skipped, end = first * num_bytes, (int(columns.max()) // size + 1) * num_bytes
        inside = slice(0, end - skipped)
        if stride - (end - skipped) < SHORTEST_GAP:  # reading the whole row is faster than one more system call
            inside, skipped, end = slice(skipped, end), 0, stride
        ascending, places = rows.sort()
        memory = torch.empty(len(rows), end - skipped, dtype=torch.uint8, device="cpu")
        is_apart = ascending.diff() != 1
        if tensor.rows_together:
            is_apart |= ascending[1:] % tensor.rows_together == 0
        begins = [0, *(torch.nonzero(is_apart).flatten() + 1).tolist()]
        for begin, stop in zip(begins, [*begins[1:], len(rows)], strict=True):
            position = tensor.position + tensor.offset(int(ascending[begin])) + skipped
            if not self.functions.read_rows(tensor.file.fileno(), position, stride, memory[begin:stop]):
                raise UserError(f"{tensor.path} is truncated, or cannot be read; download it again")
        self.bytes_read += memory.numel()
        if len(begins) > 1 or not torch.equal(ascending, rows):
            memory = memory[places.argsort()]
        return memory[:, inside].reshape(len(rows), -1, num_bytes), columns - first * size

    def _name(self, part: WeightSlice) -> str:
        """Name of the GGUF tensor from which a slice is read. An expert's matrix is read from the tensor of all experts."""
        return part.name if isinstance(part, TensorSlice) else f"{_stack(part.name)}.weight"


CHANGES = {"less one": lambda values: values - 1, "log of negated": lambda values: values.neg().log()}
"""Functions that change a tensor's values, by their names in ``family.Change``."""


def _split_halves(pair: Halves, tensors: dict[str, GgufTensor], count: int) -> None:
    """Replace tensors that fuse the two modules of ``pair`` by two tensors. A fused tensor that cannot be halved, or whose parts
    exist separately, too, is left, and later refused as unexpected.

    Args:
        tensors: tensors by the file's names.
        count: number of pieces of each tensor that are halved; 0 for the first dimension.

    Source: ggml-org/llama.cpp, convert_hf_to_gguf.py: ``--fuse-gate-up-exps``.
    """
    for name in [name for name in tensors if f".{pair.fused}." in name]:
        names = [name.replace(pair.fused, part) for part in (pair.first, pair.second)]
        parts = halves(tensors[name], count)
        if parts is not None and not any(part in tensors for part in names):
            del tensors[name]
            tensors.update(zip(names, parts, strict=True))


def _join(family: GgufFamily, tensors: dict[str, GgufTensor], num_layers: int) -> dict[str, Joined]:
    """Join tensors that the file stores in two parts, and remove the parts from ``tensors``. Parts with incompatible shapes are
    left, and later refused as unexpected. If the file also has the whole tensor, the parts are removed but not joined."""
    joined = {}
    for layer in range(num_layers):
        for module, (kind, *parts) in family.joins.items():
            name, stored = f"model.layers.{layer}.{module}", [f"model.layers.{layer}.{part}" for part in parts]
            if not all(part in tensors for part in stored):
                continue
            whole = JOINS[kind](*(tensors[part] for part in stored))
            if whole.shape is None:
                continue
            for part in stored:
                del tensors[part]
            if name not in tensors:
                joined[name] = whole
    return joined


def _make_orders(config: dict[str, Any]) -> dict[str, Order]:
    """Row orders for a model with the sizes in ``config``, by their names in ``family.Order``."""
    head_size = config.get("head_dim") or config["hidden_size"] // max(1, config["num_attention_heads"])
    orders: dict[str, Order] = {"rotated pairs": RotatedPairs(head_size)}
    if "linear_num_key_heads" in config:
        groups, size = max(1, config["linear_num_key_heads"]), max(1, config["linear_value_head_dim"])
        group, keys = max(1, config["linear_num_value_heads"] // groups), 2 * groups * config["linear_key_head_dim"]
        orders["tiled heads"] = TiledHeads(groups, group)
        orders["tiled values"] = TiledHeads(groups, group, size)
        orders["tiled values behind keys"] = TiledHeads(groups, group, size, keys)
    return orders


def _stored(order: Order | None, numbers: Range) -> torch.Tensor:
    """Rows (or columns) of a GGUF tensor that hold rows ``numbers`` (a range) of the Hugging Face tensor. ``order`` is the
    permutation of the rows; None if there is none."""
    return torch.arange(*numbers) if order is None else order.stored(*numbers)


def _whole_groups(part: MatrixSlice) -> Range:
    """Range of the slice's columns, extended to whole groups if the destination is ``Codes``."""
    codes = part.destination
    if not isinstance(codes, Codes):
        return part.columns
    return codes.first, codes.first + codes.scales.shape[1] * codes.form.group


def _is_in_stack(part: MatrixSlice) -> bool:
    return _stack(part.name) != part.name


def _stack(matrix: str) -> str:
    """Name of the stack (the tensor of all experts) that has the matrix of one expert; other names are unchanged."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", matrix)


def _name_in_layer(name: str) -> str:
    """Name of a module within its layer, from the path of the module or of one of its tensors."""
    return re.sub(r"^model\.layers\.\d+\.", "", name).removesuffix(".weight").removesuffix(".bias")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
