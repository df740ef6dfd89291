"""Inspection: errors of a model relative to a reference model, for each weight matrix and after each layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import torch
from torch import nn

from labinfer.models.layers.matrix import Matrix

SAMPLE_TOKENS = 256
"""Maximum number of tokens of the first step whose activations are kept for comparisons."""
COLUMNS = 128
"""Number of columns of a weight matrix that are compared at a time, to bound the memory (an LM head has as many rows as the
vocabulary has tokens)."""
DECODER_LAYER = re.compile(r"\.(layers\.\d+)$")


class ErrorSums(msgspec.Struct, frozen=True, array_like=True):
    """Squared numerator and denominator of a relative error, ``(error / size) ** 0.5``. ``error`` and ``size`` can be summed over
    ranks."""

    error: float
    """Squared norm of the difference."""
    size: float
    """Squared norm of the reference."""

    @classmethod
    def compare(cls, ours: torch.Tensor, exact: torch.Tensor) -> ErrorSums:
        exact = exact.double()
        return cls((ours.double() - exact).square().sum().item(), exact.square().sum().item())

    def __add__(self, other: ErrorSums) -> ErrorSums:
        return ErrorSums(self.error + other.error, self.size + other.size)

    @property
    def relative(self) -> float:
        return (self.error / self.size) ** 0.5 if self.size else float(self.error > 0)


NOTHING = ErrorSums(0.0, 0.0)


class ActivationSample:
    """Outputs of a model's layers, and inputs of their weight matrices, for the first ``SAMPLE_TOKENS`` tokens of a
    run."""

    def __init__(self) -> None:
        self.layers: dict[str, torch.Tensor] = {}
        """Maps the name of each layer to the hidden states after it, (T, D)."""
        self.inputs: dict[str, torch.Tensor] = {}
        """Maps the name of each weight matrix inside the layers to its input, (T, I)."""

    @classmethod
    @contextmanager
    def taken(cls, model: nn.Module) -> Iterator[ActivationSample]:
        """Context in which the activations of ``model``'s first step are recorded in the yielded sample."""
        sample, hooks = cls(), []
        for name, module in model.named_modules():
            if layer := DECODER_LAYER.search(name):
                hooks.append(module.register_forward_hook(partial(sample._keep_layer, layer[1])))
            elif isinstance(module, Matrix) and "layers." in name:
                hooks.append(module.register_forward_pre_hook(partial(sample._keep_input, name)))
        try:
            yield sample
        finally:
            for hook in hooks:
                hook.remove()

    def _keep_layer(self, name: str, module: nn.Module, given: tuple, output: tuple) -> None:
        if name not in self.layers:
            hidden_TD, delta_TD = output
            self.layers[name] = hidden_TD[:SAMPLE_TOKENS].float() + delta_TD[:SAMPLE_TOKENS].float()

    def _keep_input(self, name: str, module: nn.Module, given: tuple) -> None:
        if name not in self.inputs:
            self.inputs[name] = given[0][:SAMPLE_TOKENS].clone()


def layer_errors(ours: ActivationSample, exact: ActivationSample) -> dict[str, ErrorSums]:
    """Relative error of the hidden states after each layer, by layer name. The error after a layer includes the errors of earlier
    layers."""
    return {name: ErrorSums.compare(ours.layers[name], hidden_TD) for name, hidden_TD in exact.layers.items()}


@torch.inference_mode()
def weight_errors(model: nn.Module, reference: nn.Module) -> dict[str, ErrorSums]:
    """Relative error ‖W − Ŵ‖ / ‖W‖ of every weight matrix, by name. W is the matrix in ``reference``, Ŵ the dequantized matrix in
    ``model``."""
    errors = {}
    for name, ours, exact in _matrices(model, reference):
        errors[name] = NOTHING
        for begin in range(0, exact.num_inputs, COLUMNS):
            end = min(begin + COLUMNS, exact.num_inputs)
            errors[name] += ErrorSums.compare(ours.columns(begin, end), exact.columns(begin, end))
    return errors


@torch.inference_mode()
def product_errors(model: nn.Module, reference: nn.Module, exact: ActivationSample) -> dict[str, ErrorSums]:
    """Relative error of the product of every weight matrix with the inputs of the reference run (``exact``), by matrix name."""
    errors = {}
    for name, ours, theirs in _matrices(model, reference):
        if name in exact.inputs:
            x_TI = exact.inputs[name]
            errors[name] = ErrorSums.compare(ours.product(x_TI.to(ours.dtype)), theirs.product(x_TI))
    return errors


def input_peaks(exact: ActivationSample) -> dict[str, ErrorSums]:
    """For each weight matrix, the largest absolute value of a token's inputs, divided by the root mean square of the inputs. The
    rounding error of int8 activations is proportional to this ratio."""
    peaks = {}
    for name, x_TI in exact.inputs.items():
        wide_TI = x_TI.double()
        largest_T = wide_TI.abs().amax(dim=1)
        peaks[name] = ErrorSums(largest_T.square().sum().item(), wide_TI.square().mean(dim=1).sum().item())
    return peaks


def _matrices(model: nn.Module, reference: nn.Module) -> Iterator[tuple[str, Matrix, Matrix]]:
    theirs = dict(reference.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, Matrix):
            yield name, module, theirs[name]
