"""Function registry: (function, device type, dtype, quantization) → implementations.

A layer receives a ``Functions`` in its constructor and calls ``functions.add_rms_norm(…)``. The implementation was selected when the
``Functions`` was made, if need be one per bucket of batch sizes. The registry knows no implementation: ``providers.py`` fills it.
``docs/add-a-function.md`` shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Literal, Protocol, get_args

import torch
from torch.overrides import handle_torch_function, has_torch_function

from labinfer.base.errors import UserError
from labinfer.functions.dispatch import DispatchByBatchSize, by_new_tokens
from labinfer.functions.functions import ExpertFunctions, Functions, MatrixFunctions, MatrixKind

MATRIX_FUNCTIONS = ("pack_weight", "pack_codes", "linear", "gated_linear", "embedding")
"""Functions that share packed weights: their implementations must have one weight layout."""
CACHE_FUNCTIONS = ("rotate_and_write", "paged_attention")
"""Functions that share the KV cache. Each reads any layout of the cache; if both have implementations of layout ``tiles``, the cache is tiled."""
VOCABULARY_GROUP = 32
"""Group size of the vocabulary matrices in int4: finer, because no later layer compensates their errors."""
VOCABULARY_INT4 = f"int4/{VOCABULARY_GROUP}"
CODES = ("int8", "int4")
"""Quantizations of the functions for matrices that the checkpoint has quantized; 5-bit weights use the functions of ``int4``."""
EXPERT_FUNCTIONS = ("make_experts", "experts")
"""Functions that share packed experts: their implementations must have one weight layout."""
ACTIVATIONS = ("silu_and_mul", "gelu_and_mul")
"""Functions that ``gated_linear`` replaces if it has an implementation."""
WEIGHT_FUNCTIONS = (MATRIX_FUNCTIONS, EXPERT_FUNCTIONS)
REQUIRED_BY_LAYOUT = ("pack_weight", "linear", "embedding", *EXPERT_FUNCTIONS)
"""Functions that every weight layout has. The others are optional: ``gated_linear``, and ``pack_codes``, which only some checkpoints need."""
OTHER_FUNCTIONS = (
    *("add_rms_norm", *ACTIVATIONS, *CACHE_FUNCTIONS, "causal_conv", "delta_rule"),
    *("gated_norm", "selective_scan", "gated_group_norm", "write_latent", "latent_attention"),
    *("route", "argmax", "sample"),
)
CHOSEN_BY_SEQUENCE = ("latent_attention",)
"""Functions whose implementation is chosen per sequence, by its number of new tokens. Others are chosen by the batch's number of rows."""
FUNCTIONS = (*MATRIX_FUNCTIONS, *EXPERT_FUNCTIONS, *OTHER_FUNCTIONS)

WeightChoice = Literal["auto", "plain", "packed12"]
"""Storage of bfloat16 matrices: uncompressed, compressed to 12 bits a weight, or that of the chosen implementation (``auto``)."""

Choice = Mapping[str, Sequence[str]]
"""Target → implementation name for each bucket of batch sizes. A target is what gets an implementation of its own: a function such as
``paged_attention``, or a function for one kind of matrices, such as ``layer.linear`` and ``vocabulary.linear`` (see ``MatrixKind``)."""


class HasDeviceType(Protocol):
    """``torch.device``, or another name of a device. Torch may not know its type in this process."""

    type: str


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A candidate implementation of a function, and what it supports."""

    name: str
    call: Callable
    """A callable that implements the function's protocol."""
    devices: tuple[str, ...] = ()
    """Supported device types; empty for all."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Supported dtypes of activations; empty for all."""
    quantization: str = "none"
    """Quantization of the weights that it packs or reads."""
    layout: str = "plain"
    """Layout of the weights that it packs or reads: implementations of one layout are interchangeable. For a function of the KV
    cache, the cache layout that it reads fastest."""
    weights: Literal["plain", "packed12"] = "plain"
    """Storage of bfloat16 matrices, for a function that packs or reads them."""
    autotuned: bool = True
    """False for reference code: selectable by name and as the fallback, excluded from autotuning."""
    tolerance: float | None = None
    """Maximum error relative to the largest magnitude in the reference's result; None for ``trial_results.TOLERANCES``. For
    implementations of plugins."""
    plugin: str = ""
    """Plugin that the implementation comes from, set by ``FunctionRegistry.add``; empty for built-in implementations."""

    def suits(self, device: HasDeviceType, dtype: torch.dtype) -> bool:
        return (not self.devices or device.type in self.devices) and (not self.dtypes or dtype in self.dtypes)


class FunctionRegistry:
    """Candidate implementations of each function; later ones are preferred.

    Args:
        weights: allowed storage of matrices that are not quantized.
    """

    def __init__(self, weights: WeightChoice = "auto") -> None:
        self.plugin = ""
        """Name of the plugin whose implementations are being added; empty for built-in ones."""
        self._weights = weights
        self._candidates: dict[str, list[Implementation]] = {name: [] for name in FUNCTIONS}

    def add(self, function: str, implementation: Implementation) -> None:
        """Add an implementation; it is preferred to those added before.

        Raises:
            KeyError: the function does not exist.
            UserError: a plugin's implementation has the name of an existing one of another source.
        """
        if function not in self._candidates:
            raise KeyError(f"unknown function {function!r}; available: {', '.join(self._candidates)}")
        if self.plugin:
            name = implementation.name
            if any(item.name == name and item.plugin != self.plugin for item in self._candidates[function]):
                raise UserError(f"{function} already has an implementation {name!r:.60}; choose another name")
            implementation = replace(implementation, call=_show_to_capture(implementation.call), plugin=self.plugin)
        self._candidates[function].append(implementation)

    def add_all(self, calls: Mapping[str, Callable], **description) -> None:
        """Add an implementation for each function in ``calls``; ``description`` are the fields of ``Implementation`` that all share."""
        for function, call in calls.items():
            self.add(function, Implementation(call=call, **description))

    def candidates(
        self,
        function: str,
        device: HasDeviceType,
        dtype: torch.dtype,
        overrides: Mapping[str, str] | None = None,
        quantization: str = "none",
    ) -> dict[str, Implementation]:
        """Implementations of ``function`` that support the device, dtype and quantization, by name, the preferred one last.

        Args:
            overrides: implementation names by function, which ``select`` validates; only candidates compatible with them are returned.
        """
        overrides = overrides or {}

        def matches(function: str) -> dict[str, Implementation]:
            return {
                item.name: item
                for item in self._candidates[function]
                if item.suits(device, dtype)
                and item.quantization == quantization
                and self._holds_weights(function, item)
            }

        allowed = matches(function)
        for other in layout_group(function):
            named = matches(other).get(overrides[other]) if other in overrides else None
            if named is not None:
                layout = named.layout
                allowed = {name: item for name, item in allowed.items() if item.layout == layout}
        return {name: item for name, item in allowed.items() if overrides.get(function, name) == name}

    def _holds_weights(self, function: str, item: Implementation) -> bool:
        """Whether ``item`` stores matrices as the ``weights`` option allows."""
        if self._weights == "auto" or function not in MATRIX_FUNCTIONS or item.quantization != "none":
            return True
        return item.weights == self._weights

    def select(
        self,
        device: HasDeviceType,
        dtype: torch.dtype,
        overrides: Mapping[str, str] | None = None,
        quantization: str = "none",
        choice: Choice | None = None,
    ) -> Functions:
        """One implementation of each function, or one for each bucket of batch sizes.

        Args:
            overrides: implementation names by function; they take precedence over ``choice``.
            quantization: quantization of the run, see ``kind_quantization``.
            choice: the fastest implementations as measured. Targets that it lacks get the preferred implementation.

        Raises:
            UserError: a function or implementation does not exist, ``overrides`` have different weight layouts, or a weight layout lacks a function.
        """
        overrides, choice = overrides or {}, choice or {}
        self.check(device, dtype, overrides, quantization)

        def layout_candidates(
            functions: Sequence[str], target: str, own: str, is_named: bool
        ) -> dict[str, dict[str, Implementation]]:
            """Candidates of ``functions``, all with one weight layout: the layout of the function after the dot in ``target`` (``linear``)."""
            allowed = overrides
            if not is_named:  # an override for other weights may not exist for this quantization
                allowed = {
                    f: name for f, name in overrides.items() if name in self.candidates(f, device, dtype, {}, own)
                }
            known = {name: self.candidates(name, device, dtype, allowed, own) for name in functions}
            return _matching_layout(known, target.rpartition(".")[2], choice.get(target, ()))

        def matrix_functions(target: str, own: str, is_named: bool) -> MatrixFunctions:
            known = layout_candidates(MATRIX_FUNCTIONS, target, own, is_named)
            return MatrixFunctions(
                pack_weight=_pick(known["pack_weight"]),
                linear=_pick(known["linear"], choice.get(target, ())),
                gated_linear=_gated_linear(known, choice.get(target, ()), overrides),
                embedding=_pick(known["embedding"]),
                target=target,
                quantization=own,
                pack_codes=_pick(known["pack_codes"]) if known["pack_codes"] else None,
                packing=_packing(known["pack_weight"], own),
            )

        def expert_functions(target: str, own: str, is_named: bool) -> ExpertFunctions:
            known = layout_candidates(EXPERT_FUNCTIONS, target, own, is_named)
            return ExpertFunctions(
                make_experts=_pick(known["make_experts"]),
                experts=_pick(known["experts"], choice.get(target, ())),
                target=target,
                quantization=own,
                packing=_packing(known["make_experts"], own),
            )

        others = {
            name: _pick(
                self.candidates(name, device, dtype, overrides),
                choice.get(name, ()),
                by_new_tokens if name in CHOSEN_BY_SEQUENCE else DispatchByBatchSize,
            )
            for name in OTHER_FUNCTIONS
        }
        return Functions(
            matrices={
                kind: matrix_functions(f"{kind}.linear", kind_quantization(kind, quantization), kind != "exact")
                for kind in get_args(MatrixKind)
            },
            codes={own: matrix_functions(f"{own}.linear", own, is_named=False) for own in CODES},
            experts=expert_functions("experts", kind_quantization("expert", quantization), is_named=True),
            coded_experts={own: expert_functions(f"{own}.experts", own, is_named=False) for own in CODES},
            tiled_cache=self.tiled_cache(device, dtype, overrides),
            **others,
        )

    def tiled_cache(
        self, device: HasDeviceType, dtype: torch.dtype, overrides: Mapping[str, str] | None = None
    ) -> bool:
        """Whether the KV cache is tiled: if every function of ``CACHE_FUNCTIONS`` has a candidate that is fastest with tiles. The other
        candidates can read tiles, too."""
        candidates = (self.candidates(name, device, dtype, overrides).values() for name in CACHE_FUNCTIONS)
        return all(any(item.layout == "tiles" for item in known) for known in candidates)

    @property
    def implementations(self) -> list[Implementation]:
        """All implementations of all functions."""
        return [item for items in self._candidates.values() for item in items]

    def all_candidates(self, function: str) -> list[Implementation]:
        """All implementations of ``function``, the preferred one last."""
        return list(self._candidates[function])

    def drop(self, function: str, name: str, quantization: str) -> None:
        """Remove the implementation ``name`` of ``function`` for weights in ``quantization``."""
        items = self._candidates[function]
        self._candidates[function] = [each for each in items if (each.name, each.quantization) != (name, quantization)]

    def check(self, device: HasDeviceType, dtype: torch.dtype, overrides: Mapping[str, str], quantization: str) -> None:
        """Validate the names in ``overrides``, that the given implementations share their packed layouts, and that no layout lacks a function.

        Raises:
            UserError: see ``select``.
        """
        if self._weights == "packed12" and dtype != torch.bfloat16:
            name = str(dtype).removeprefix("torch.")
            raise UserError(
                f"--weights packed12 is for bfloat16, not for {name}; give --dtype bfloat16, or --weights auto"
            )
        if self._weights == "packed12" and device.type != "cpu":
            raise UserError(f"--weights packed12 is for CPUs, not for {device.type}; give --weights auto")
        for function, name in overrides.items():
            if function not in self._candidates:
                known = ", ".join(FUNCTIONS)
                raise UserError(f"--functions {function}={name}: unknown function; available: {known}")
        fused, linear = overrides.get("gated_linear"), overrides.get("linear")
        if fused and linear and fused != linear and fused != "reference":
            raise UserError(
                f"--functions linear={linear},gated_linear={fused}: both are used for the same layers; give one of "
                "them, the same name for both, or gated_linear=reference"
            )
        for own in {kind_quantization(kind, quantization): None for kind in get_args(MatrixKind) if kind != "exact"}:
            layouts: dict[tuple[str, ...], set[str]] = {}
            for function, name in overrides.items():
                reads_weights = layout_group(function)
                # not every linear has a fused gated_linear
                looked_up = "linear" if function == "gated_linear" else function
                known = self.candidates(looked_up, device, dtype, {}, own if reads_weights else "none")
                if known and name not in known:
                    raise UserError(
                        f"--functions {function}={name}: no such implementation for "
                        f"{_describe(device, dtype, own if reads_weights else 'none')}; choose one of "
                        f"{', '.join(known)}"
                    )
                if known and reads_weights and (function, name) != ("gated_linear", "reference"):
                    layouts.setdefault(reads_weights, set()).add(known[name].layout)
            for group, different in layouts.items():
                if len(different) > 1:
                    given = ",".join(f"{function}={overrides[function]}" for function in group if function in overrides)
                    raise UserError(
                        f"--functions {given}: these functions share packed weights, but pack them differently; "
                        "choose compatible names"
                    )
        for own in dict.fromkeys((*(kind_quantization(kind, quantization) for kind in get_args(MatrixKind)), *CODES)):
            self._check_layouts(device, dtype, own)

    def _check_layouts(self, device: HasDeviceType, dtype: torch.dtype, quantization: str) -> None:
        """Check that each weight layout has all of ``REQUIRED_BY_LAYOUT``."""
        for group in WEIGHT_FUNCTIONS:
            known = {each: self.candidates(each, device, dtype, {}, quantization).values() for each in group}
            for function, item in ((each, item) for each in group for item in known[each]):
                has = [each for each in group if any(other.layout == item.layout for other in known[each])]
                if missing := " and ".join(each for each in group if each in REQUIRED_BY_LAYOUT and each not in has):
                    source = f"--plugin {item.plugin}: " if item.plugin else ""
                    raise UserError(
                        f"{source}{function}={item.name} is for the weight layout {item.layout!r}, which lacks {missing} "
                        f"for {_describe(device, dtype, quantization)}; register the missing functions, too"
                    )


def _show_to_capture(call: Callable) -> Callable:
    """Wrap a plugin's function so that a capture sees one opaque operation, which cannot be replayed: it may read the batch's lists in Python
    or call libraries that torch does not see."""

    @wraps(call)
    def plugin_function(*arguments, **named):
        if has_torch_function(arguments):
            return handle_torch_function(plugin_function, arguments, *arguments, **named)
        return call(*arguments, **named)

    plugin_function.is_opaque = True
    return plugin_function


def _describe(device: HasDeviceType, dtype: torch.dtype, quantization: str) -> str:
    """Device, dtype and quantization in words, for errors."""
    weights = {"none": "", VOCABULARY_INT4: ", int4 vocabulary"}.get(quantization, f", weights in {quantization}")
    return f"{device.type} in {str(dtype).removeprefix('torch.')}{weights}"


def layout_group(function: str) -> tuple[str, ...]:
    """The functions that share packed weights with ``function``, itself included; empty if it reads none."""
    return next((group for group in WEIGHT_FUNCTIONS if function in group), ())


def _matching_layout(
    known: Mapping[str, Mapping[str, Implementation]], reader: str, names: Sequence[str]
) -> dict[str, dict[str, Implementation]]:
    """Candidates of one weight layout: the layout of the first candidate of ``reader`` in ``names``, else of the preferred candidate of ``reader``."""
    readers = known[reader]
    layout = next(readers[name] for name in (*names, *reversed(readers)) if name in readers).layout
    return {
        function: {name: item for name, item in candidates.items() if item.layout == layout}
        for function, candidates in known.items()
    }


def _pick(
    candidates: Mapping[str, Implementation],
    names: Sequence[str] = (),
    combine: Callable[[Sequence[Callable]], Callable] = DispatchByBatchSize,
) -> Callable:
    """The preferred candidate's callable, or those of ``names`` (one per bucket), combined by ``combine`` if they differ."""
    preferred = candidates[next(reversed(candidates))]
    calls = [candidates.get(name, preferred).call for name in names] or [preferred.call]
    return calls[0] if len(set(map(id, calls))) == 1 else combine(calls)


def _gated_linear(
    known: Mapping[str, Mapping[str, Implementation]], names: Sequence[str], overrides: Mapping[str, str]
) -> Callable | None:
    """The fused gated product that matches ``linear`` by name; None if a selected implementation has no fused one, or if the user names an
    implementation of an activation, which the fused product would replace."""
    linear, gated = known["linear"], known["gated_linear"]
    if "gated_linear" in overrides:
        named = gated.get(overrides["gated_linear"])
        return None if named is None else named.call
    if any(name in overrides for name in ACTIVATIONS):
        return None
    preferred = next(reversed(linear))
    names = [name if name in linear else preferred for name in names] or [preferred]
    return _pick(gated, names) if all(name in gated for name in names) else None


def _packing(candidates: Mapping[str, Implementation], quantization: str) -> str:
    """Name, layout and quantization of the packing implementation that ``_pick`` takes."""
    item = candidates[next(reversed(candidates))]
    return f"{item.name} {item.layout} {quantization}"


def kind_quantization(kind: MatrixKind, quantization: str) -> str:
    """Quantization of a kind of matrices in a run with ``--quantization``; an int4 vocabulary has a smaller group size."""
    if kind == "exact":
        return "none"
    return VOCABULARY_INT4 if kind == "vocabulary" and quantization == "int4" else quantization
