"""Fill a rank's parameters from a checkpoint, strictly both ways: nothing missing, nothing left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from labinfer.errors import UserError
from labinfer.weights.checkpoint import Checkpoint
from labinfer.weights.source import TensorSource, WeightedModule

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors of old exports that are computed here."""


def sources_of(model: nn.Module) -> Iterator[TensorSource]:
    """What every parameter of a model needs from the checkpoint."""
    for name, module in model.named_modules():
        if isinstance(module, WeightedModule):
            yield from module.sources(name)


def load_weights(model: nn.Module, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> None:
    """Pull each parameter's slice. ``on_progress(done, total)`` counts tensors.

    Raises:
        UserError: a tensor is missing or has the wrong shape.
    """
    sources = list(sources_of(model))
    for done, source in enumerate(sources):
        on_progress(done, len(sources))
        checkpoint.read_into(source)
    for module in model.modules():
        if isinstance(module, WeightedModule):
            module.pack()
    on_progress(len(sources), len(sources))


def check_nothing_left_over(whole_model: nn.Module, checkpoint: Checkpoint, tied_head: bool) -> None:
    """Compare a checkpoint's names with those of the whole model (built on the meta device).

    Raises:
        UserError: the checkpoint has tensors that the model has no place for.
    """
    expected = {source.name for source in sources_of(whole_model)}
    if tied_head:
        expected.add("lm_head.weight")  # some exports repeat the tied embedding
    extra = sorted(name for name in checkpoint.names - expected if not name.endswith(IGNORED_SUFFIXES))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UserError(
            f"{checkpoint.directory} has tensor {extra[0]}{more}, which the model in its config.json has no place for"
        )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, shared ones counted once."""
    return sum(parameter.nbytes for parameter in model.parameters())
