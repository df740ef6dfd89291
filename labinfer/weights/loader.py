"""Loader: fills a rank's parameters from a checkpoint, without missing or unexpected tensors."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import nn

from labinfer.base.errors import UserError
from labinfer.native.cache_file import digest
from labinfer.weights.checkpoint import CheckpointReader
from labinfer.weights.checkpoint_names import CheckpointNames
from labinfer.weights.codes import Codes, QuantLayout
from labinfer.weights.loading import LoadFunctions
from labinfer.weights.slices import MatrixSlice, WeightSlice
from labinfer.weights.weighted_module import WeightedModule

logger = logging.getLogger(__name__)

ROTARY_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Name suffixes of tables of rotary embedding in old exports. The loader ignores them: tables are computed from the config."""
MASK_BUFFERS = ("attn.bias", "attn.masked_bias")
"""Name suffixes of causal masks, and of the score of masked positions, in old exports."""
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")
"""Name suffixes of scales for a KV cache in FP8, which LABInfer does not support."""
OUTPUT_SCALE = ".output_scale"
"""Name suffix of the FP8 scale of a projection's outputs (one number), which is ignored: outputs stay in floating point."""


class KeptWeights(Protocol):
    """Cache of packed weights. ``slices`` is a digest of all slices of a model's modules, and of how modules pack them."""

    def open(self, slices: str, functions: LoadFunctions) -> Mapping[str, Any] | None:
        """Cached results of ``WeightedModule.export_packed`` by module path, or None."""

    def keep(self, slices: str, states: dict[str, Any], functions: LoadFunctions) -> Any:
        """Cache ``states`` (see ``open``) for later launches, without waiting for the disk."""


def weight_slices(model: nn.Module, names: CheckpointNames | None = None) -> Iterator[WeightSlice]:
    """Slices that fill the parameters of a model, module by module, named as in the checkpoint.

    Args:
        names: the family's names, resolved for a checkpoint; default: names that are not resolved.
    """
    names = names or _names(model)
    for name, module in _weighted_modules(model):
        for part in module.slices(name):
            yield _stored(part, names)


def choose_forms(model: nn.Module, form: Callable[[str], QuantLayout | None]) -> None:
    """Choose the form in memory of each matrix of a new model, whose parameters are on the meta device.

    Args:
        form: returns the form of a matrix, given its checkpoint name; None for floating point.
    """
    names = _names(model)

    def choose(matrix: str) -> QuantLayout | None:
        """Form of ``matrix`` if all its possible names give one form; else floating point (None), which every format provides."""
        forms = {form(name) for name in names.spellings(matrix)}
        return forms.pop() if len(forms) == 1 else None

    for name, module in _weighted_modules(model):
        module.choose_forms(name, choose)


def load_weights(
    model: nn.Module,
    checkpoint: CheckpointReader,
    device: torch.device,
    on_progress: Callable[[int, int], None],
    files: KeptWeights | None = None,
) -> None:
    """Allocate the memory of a model on the meta device, and fill it from the checkpoint.

    Modules are loaded and packed one after another, so that the whole model is never held unpacked.

    Args:
        on_progress: called with (done, total) bytes of memory to be filled; not called if ``files`` has every module.
        files: cache of packed weights, which is read if it has this model's, else written.

    Raises:
        UserError: a tensor is missing, has the wrong shape, or contains NaN or infinity.
    """
    names, done = _names(model).resolve(checkpoint.names), 0
    _hold_as_stored(model, checkpoint, names)
    slices = digest(_describe(model, names)) if files is not None else ""
    packed = files.open(slices, checkpoint.functions) if files is not None else None
    states = packed or {}
    modules = dict(_weighted_modules(model))
    total = sum(part.destination.nbytes for name in modules.keys() - states for part in modules[name].slices(name))

    def read(part: WeightSlice) -> None:
        nonlocal done
        on_progress(done, total)
        checkpoint.load(_stored(part, names))
        _check_finite(part)
        done += part.destination.nbytes

    for module in modules.values():
        module.check_room()
    for name, module in modules.items():
        if name in states:
            module.import_packed(states[name])
        else:
            module.allocate(device)
            module.load(name, read)
    if total:
        on_progress(total, total)
    if files is not None and packed is None:
        exported = {name: module.export_packed() for name, module in modules.items()}
        files.keep(slices, {name: state for name, state in exported.items() if state is not None}, checkpoint.functions)


def check_checkpoint(
    whole_model: nn.Module, checkpoint: CheckpointReader, tied_head: bool, ignored: Sequence[str] = ()
) -> None:
    """Compare names, shapes and dtypes of a checkpoint's tensors with the whole model (on the meta device).

    Reads only values that may contradict the config: zero points, group indices, biases.

    Args:
        ignored: globs of ``--ignore-tensors``; matching tensors may be left unread.

    Raises:
        UserError: the checkpoint has tensors that the model does not use, lacks a tensor, or has one of a wrong shape or dtype or that
            contradicts the config; or ``ignored`` matches a tensor that the model needs.
    """
    names, num_layers = _names(whole_model).resolve(checkpoint.names), len(whole_model.model.layers)
    _hold_as_stored(whole_model, checkpoint, names)
    expected: set[str] = set()
    for _, parts in itertools.groupby(weight_slices(whole_model, names), key=lambda part: part.name):
        part = next(parts)  # slices of one matrix follow each other and read one set of tensors
        checkpoint.check(part)
        expected.update(checkpoint.tensor_names(part))
    matched = {name for name in checkpoint.names if any(fnmatchcase(name, glob) for glob in ignored)}
    for name in sorted(matched & expected):
        raise UserError(f"--ignore-tensors matches {name}, which the model needs; use a narrower pattern")
    if tied_head:
        head = names.stored("lm_head")
        expected.update(checkpoint.format(head).tensor_names(head))  # some exports store a tied head, too
    unread = tuple(
        f"{names.stored(path)}." for name, module in _weighted_modules(whole_model) for path in module.unread(name)
    )
    others = sorted(
        name
        for name in checkpoint.names - expected
        if not name.startswith(unread) and not _is_buffer(name, checkpoint.shape(name))
    )
    if unread := [name for name in others if name in matched]:
        logger.info("--ignore-tensors: %d tensors are not loaded: %s", len(unread), ", ".join(unread))
        others = [name for name in others if name not in matched]
    ignored_parts = names.ignored_parts(num_layers, checkpoint.names)
    parts = [next(filter(name.startswith, ignored_parts), "").rstrip("._") for name in others]
    extra = [name for name, part in zip(others, parts, strict=True) if not part and not _is_zero_bias(name, checkpoint)]
    if left_out := Counter(filter(None, parts)):
        logger.info(
            "%d tensors of %s are not loaded: only the text model runs", left_out.total(), " and ".join(left_out)
        )
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UserError(
            f"{checkpoint.directory} has tensor {extra[0]}{more}, which the model of its config.json does not use; "
            f"to load the model without it, add --ignore-tensors '{extra[0]}'"
        )


def pack_weights(model: nn.Module) -> None:
    """Pack all loaded weights into the order that kernels read."""
    for _, module in _weighted_modules(model):
        module.pack()


def weight_bytes(model: nn.Module) -> int:
    """Bytes that all weights take (or would take, on the meta device). Shared weights count once."""
    return sum(module.num_bytes for _, module in _weighted_modules(model))


def _check_finite(part: WeightSlice) -> None:
    """Refuse a loaded slice with NaN or infinity. Runs right after loading, while the slice is in the CPU caches."""
    memory = part.destination
    parts = (memory.scales, memory.minima) if isinstance(memory, Codes) else (memory,)
    floats = [values for values in parts if values is not None and values.numel() and values.is_floating_point()]
    for value in (bound for values in floats for bound in torch.aminmax(values)):
        if not math.isfinite(number := value.item()):
            raise UserError(
                f"{part.name} of the checkpoint contains {number} (as {value.dtype}); download it again, or give "
                "another --dtype if it is float16"
            )


def _is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the loader ignores a tensor, as Transformers does: a table computed from the config, or an FP8 scale."""
    if name.endswith(MASK_BUFFERS):
        return len(shape) != 1 or shape[0] == 1  # a tensor with one dimension would be a bias
    if name.endswith(OUTPUT_SCALE):
        return math.prod(shape) == 1
    return name.endswith((*ROTARY_BUFFERS, *KV_SCALES))


def _is_zero_bias(name: str, checkpoint: CheckpointReader) -> bool:
    """Whether a tensor is a bias of zeros, which old exports of GPTQ have for every projection."""
    shape = checkpoint.shape(name)
    return name.endswith(".bias") and len(shape) == 1 and not checkpoint.read(name, shape, (), torch.float32).any()


def _hold_as_stored(model: nn.Module, checkpoint: CheckpointReader, names: CheckpointNames) -> None:
    """Switch modules to floating point if their tensors are unquantized although the config does not list them.

    Configs list unquantized modules, but never experts, which are no modules in Transformers.
    """
    for name, module in _weighted_modules(model):
        parts = (part for part in module.slices(name) if isinstance(part, MatrixSlice))
        if any(isinstance(part.destination, Codes) and checkpoint.is_plain(_stored(part, names)) for part in parts):
            module.use_float_values()


def _weighted_modules(model: nn.Module) -> Iterator[tuple[str, WeightedModule]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, WeightedModule))


def _stored(part: WeightSlice, names: CheckpointNames) -> WeightSlice:
    """Copy of a slice with the name that it has in the checkpoint, instead of that in the model."""
    if not names.renamed:
        return part
    changes: dict[str, Any] = {"name": names.stored(part.name)}
    if isinstance(part, MatrixSlice) and part.stack is not None:
        changes["stack"] = replace(part.stack, name=names.stored(part.stack.name))
    return replace(part, **changes)


def _describe(model: nn.Module, names: CheckpointNames) -> list[tuple]:
    """Everything that packed weights depend on, except the checkpoint and the code: the slices and the packing of each module."""
    modules = []
    for name, module in _weighted_modules(model):
        parts = []
        for part in module.slices(name):
            memory = part.destination
            form = memory.form if isinstance(memory, Codes) else (memory.dtype, tuple(memory.shape))
            parts.append((_stored(replace(part, destination=None), names), form))
        modules.append((name, type(module).__name__, module.packing, parts))
    return modules


def _names(model: nn.Module) -> CheckpointNames:
    """Checkpoint names of a model's family; default names if ``model`` is a layer."""
    return getattr(model, "names", CheckpointNames())
