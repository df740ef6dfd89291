"""Function registry: (function, device type, dtype, quantization) → implementations.

A layer is handed a ``Functions`` in its constructor and calls ``functions.add_rms_norm(…)``; which implementation that is
was decided when the ``Functions`` was made, where need be for each class of rows. The registry knows no implementation:
``providers.py`` fills it. ``docs/add-a-function.md`` shows how to add one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Literal, get_args

import torch
from torch.overrides import handle_torch_function, has_torch_function

from labinfer.base.errors import UserError
from labinfer.functions.by_sequence import BySequence
from labinfer.functions.functions import ExpertFunctions, Functions, MatrixFunctions, MatrixKind

MATRIX_FUNCTIONS = ("pack_weight", "pack_codes", "linear", "gated_linear", "embedding")
"""Functions that share packed weights, so that their implementations must be of one layout."""
CACHE_FUNCTIONS = ("rotate_and_write", "paged_attention")
"""Functions that share the KV cache. All take it in any layout; where both have the layout ``tiles`` it is kept in tiles."""
VOCABULARY_GROUP = 32
"""Inputs of the vocabulary that share a scale in int4: no later layer evens its errors out."""
VOCABULARY_INT4 = f"int4/{VOCABULARY_GROUP}"
CODES = ("int8", "int4")
"""Quantizations in which checkpoints hold codes."""
EXPERT_FUNCTIONS = ("make_experts", "experts")
"""The same for the experts of a mixture."""
ACTIVATIONS = ("silu_and_mul", "gelu_and_mul")
"""Functions of which ``gated_linear`` takes the place where there is one."""
WEIGHT_FUNCTIONS = (MATRIX_FUNCTIONS, EXPERT_FUNCTIONS)
OTHER_FUNCTIONS = (
    *(
        "add_rms_norm",
        *ACTIVATIONS,
        "rotate_and_write",
        "paged_attention",
        "causal_conv",
        "delta_rule",
    ),
    *("gated_norm", "write_latent", "latent_attention", "route", "argmax", "sample"),
)
CHOSEN_BY_SEQUENCE = ("latent_attention",)
"""Functions of which each sequence of a batch has an implementation by its own new tokens; that of others goes by all rows."""
FUNCTIONS = (*MATRIX_FUNCTIONS, *EXPERT_FUNCTIONS, *OTHER_FUNCTIONS)

WeightChoice = Literal["auto", "plain", "packed12"]
"""Form of matrices in bfloat16: as they are, 12 bits a weight, or that of whichever implementation is chosen."""

BATCH_BUCKETS = (1, 8, 32, 128)
"""Upper bounds of the buckets of batch sizes (rows, which are tokens), but for the last bucket: one request, a few, many, small prompts,
prompts."""
Choice = Mapping[str, Sequence[str]]
"""Names of implementations, one for each bucket of batch sizes, by target: a function, or ``linear`` of a kind of matrices, such as
``layer.linear``."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A candidate for a function."""

    name: str
    call: Callable
    """Callable of the function's protocol."""
    devices: tuple[str, ...] = ()
    """Device types it runs on; empty for all."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Dtypes of activations it takes; empty for all."""
    quantization: str = "none"
    """Quantization of the weights it reads, if it is a function of matrices."""
    layout: str = "plain"
    """The order in which it packs or reads weights: implementations of one layout can take turns. Of a function that reads
    the KV cache the layout in which it reads it fastest."""
    weights: Literal["plain", "packed12"] = "plain"
    """Form in which a function of matrices holds those in bfloat16."""
    autotuned: bool = True
    """False for reference code: selectable by name and as the fallback, excluded from autotuning."""
    tolerance: float | None = None
    """Largest difference from the reference's result, as a part of its largest number; None for ``check_plugins.TOLERANCES``. For
    implementations of plugins."""
    plugin: str = ""
    """The plugin that it comes from, which ``FunctionRegistry.add`` fills in; empty for one that ships."""

    def suits(self, device: torch.device, dtype: torch.dtype) -> bool:
        return (not self.devices or device.type in self.devices) and (not self.dtypes or dtype in self.dtypes)


class DispatchByBatchSize:
    """A function with an implementation for each bucket of batch sizes; the size is that of its first argument.

    Args:
        calls: one for each of ``BATCH_BUCKETS``.
    """

    def __init__(self, calls: Sequence[Callable]):
        self._calls = tuple(calls)

    def __call__(self, argument: torch.Tensor, /, *others, **named):
        return self._calls[bisect_left(BATCH_BUCKETS, argument.shape[0])](argument, *others, **named)


def by_new_tokens(calls: Sequence[Callable]) -> BySequence:
    """A function that chooses an implementation for each sequence by the number of its new tokens.

    Args:
        calls: one for each of ``BATCH_BUCKETS``.
    """
    return BySequence(lambda num_new, *others: calls[bisect_left(BATCH_BUCKETS, num_new)])


class FunctionRegistry:
    """The candidates for each function; later ones are preferred.

    Args:
        weights: how matrices that are not quantised may be held.
    """

    def __init__(self, weights: WeightChoice = "auto") -> None:
        self.plugin = ""
        """The plugin whose implementations are added now."""
        self._weights = weights
        self._candidates: dict[str, list[Implementation]] = {name: [] for name in FUNCTIONS}

    def add(self, function: str, implementation: Implementation) -> None:
        """Add an implementation, which is preferred to those before it.

        Raises:
            KeyError: there is no such function.
            UserError: a plugin's implementation has the name of one that is not its own.
        """
        if function not in self._candidates:
            raise KeyError(f"no function {function!r}; there are {', '.join(self._candidates)}")
        if self.plugin:
            name = implementation.name
            if any(item.name == name and item.plugin != self.plugin for item in self._candidates[function]):
                raise UserError(f"there is an implementation {name!r:.60} of {function} already; choose another name")
            implementation = replace(implementation, call=_show_to_capture(implementation.call), plugin=self.plugin)
        self._candidates[function].append(implementation)

    def add_all(self, calls: Mapping[str, Callable], **description) -> None:
        """Add an implementation of each of these functions; all are described alike, as ``Implementation`` has it."""
        for function, call in calls.items():
            self.add(function, Implementation(call=call, **description))

    def candidates(
        self,
        function: str,
        device: torch.device,
        dtype: torch.dtype,
        overrides: Mapping[str, str] | None = None,
        quantization: str = "none",
    ) -> dict[str, Implementation]:
        """Implementations by name, the preferred one last.

        Args:
            overrides: as for ``select``, which refuses unknown names; only what they allow is returned.
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
        for other in _layout_group(function):
            named = matches(other).get(overrides[other]) if other in overrides else None
            if named is not None:
                layout = named.layout
                allowed = {name: item for name, item in allowed.items() if item.layout == layout}
        return {name: item for name, item in allowed.items() if overrides.get(function, name) == name}

    def _holds_weights(self, function: str, item: Implementation) -> bool:
        """Whether matrices may be held as this implementation does it."""
        if self._weights == "auto" or function not in MATRIX_FUNCTIONS or item.quantization != "none":
            return True
        return item.weights == self._weights

    def select(
        self,
        device: torch.device,
        dtype: torch.dtype,
        overrides: Mapping[str, str] | None = None,
        quantization: str = "none",
        choice: Choice | None = None,
    ) -> Functions:
        """One implementation of each function, or one for each class of rows.

        Args:
            overrides: names of implementations by function, instead of the choice and the preferred one.
            quantization: that of the run, see ``kind_quantization``.
            choice: what was measured to be fastest; the preferred one where it says nothing.

        Raises:
            UserError: there is no such function or implementation, or they read weights in different layouts.
        """
        overrides, choice = overrides or {}, choice or {}
        self.check(device, dtype, overrides, quantization)

        def layout_candidates(
            functions: Sequence[str], target: str, own: str, is_named: bool
        ) -> dict[str, dict[str, Implementation]]:
            """Candidates of functions that share a layout; the last part of the target names the one that decides about it."""
            allowed = overrides
            if not is_named:  # named for other weights, an implementation need not know these
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
                embedding=_pick(known["embedding"]) if known["embedding"] else None,
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

    def tiled_cache(self, device: torch.device, dtype: torch.dtype, overrides: Mapping[str, str] | None = None) -> bool:
        """Whether the KV cache is kept in tiles: where each function that reads it has a candidate that is fastest so. Others take it, too."""
        candidates = (self.candidates(name, device, dtype, overrides).values() for name in CACHE_FUNCTIONS)
        return all(any(item.layout == "tiles" for item in known) for known in candidates)

    @property
    def has_plugins(self) -> bool:
        """Whether there are implementations of plugins."""
        return any(item.plugin for items in self._candidates.values() for item in items)

    def check(self, device: torch.device, dtype: torch.dtype, overrides: Mapping[str, str], quantization: str) -> None:
        """Refuse unknown names, and names of matrices' functions that do not go together.

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
                raise UserError(f"--functions {function}={name}: there is no such function; there are {known}")
        fused, linear = overrides.get("gated_linear"), overrides.get("linear")
        if fused and linear and fused != linear and fused != "reference":
            raise UserError(
                f"--functions linear={linear},gated_linear={fused}: these take turns; name one of them, or both alike, or give "
                "gated_linear=reference for two calls"
            )
        for own in {kind_quantization(kind, quantization): None for kind in get_args(MatrixKind) if kind != "exact"}:
            layouts: dict[tuple[str, ...], set[str]] = {}
            for function, name in overrides.items():
                reads_weights = _layout_group(function)
                looked_up = "linear" if function == "gated_linear" else function  # not each of those has one
                known = self.candidates(looked_up, device, dtype, {}, own if reads_weights else "none")
                if known and name not in known:
                    raise UserError(
                        f"--functions {function}={name}: there is none of this name for "
                        f"{_describe(device, dtype, own if reads_weights else 'none')}; choose one of {', '.join(known)}"
                    )
                if known and reads_weights and (function, name) != ("gated_linear", "reference"):
                    layouts.setdefault(reads_weights, set()).add(known[name].layout)
            for group, different in layouts.items():
                if len(different) > 1:
                    given = ",".join(f"{function}={overrides[function]}" for function in group if function in overrides)
                    raise UserError(
                        f"--functions {given}: these share packed weights, but pack them in different ways; choose names that go together"
                    )


def _show_to_capture(call: Callable) -> Callable:
    """A plugin's function that whoever captures a step sees as one operation, which cannot be repeated: it may read lists of the batch, or
    call what torch does not see."""

    @wraps(call)
    def plugin_function(*arguments, **named):
        if has_torch_function(arguments):
            return handle_torch_function(plugin_function, arguments, *arguments, **named)
        return call(*arguments, **named)

    plugin_function.is_opaque = True
    return plugin_function


def _describe(device: torch.device, dtype: torch.dtype, quantization: str) -> str:
    """Circumstances in which implementations are looked for, in words."""
    weights = {"none": "", VOCABULARY_INT4: ", the vocabulary in int4"}.get(
        quantization, f", weights in {quantization}"
    )
    return f"{device.type} in {str(dtype).removeprefix('torch.')}{weights}"


def _layout_group(function: str) -> tuple[str, ...]:
    """The functions that read weights packed for this one, itself included; empty for one that reads none."""
    return next((group for group in WEIGHT_FUNCTIONS if function in group), ())


def _matching_layout(
    known: Mapping[str, Mapping[str, Implementation]], reader: str, names: Sequence[str]
) -> dict[str, dict[str, Implementation]]:
    """The candidates that go with the reader's first of these names that there is, or with its preferred one."""
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
    """The preferred candidate, or those with these names by batch size."""
    preferred = candidates[next(reversed(candidates))]
    calls = [candidates.get(name, preferred).call for name in names] or [preferred.call]
    return calls[0] if len(set(map(id, calls))) == 1 else combine(calls)


def _gated_linear(
    known: Mapping[str, Mapping[str, Implementation]], names: Sequence[str], overrides: Mapping[str, str]
) -> Callable | None:
    """The function that goes with ``linear``, of the same names; None where one of these has none, or where an activation is asked
    for by name, in whose place it would be used."""
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
    """The implementation that ``_pick`` takes, in words."""
    item = candidates[next(reversed(candidates))]
    return f"{item.name} {item.layout} {quantization}"


def kind_quantization(kind: MatrixKind, quantization: str) -> str:
    """Quantization of a kind of matrices in a run with ``--quantization``; a vocabulary in 4 bits has finer groups."""
    if kind == "exact":
        return "none"
    return VOCABULARY_INT4 if kind == "vocabulary" and quantization == "int4" else quantization


def parse_overrides(given: tuple[str, ...]) -> dict[str, str]:
    """``--functions linear=reference,…``, or one name for all."""
    overrides: dict[str, str] = {}
    for part in given:
        function, _, name = part.partition("=")
        if name:
            overrides[function] = name
        elif part != "auto":
            overrides |= dict.fromkeys(FUNCTIONS, part)
    return overrides
