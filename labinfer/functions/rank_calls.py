"""``RankCalls``: the function calls of one rank's layers, with the candidate implementations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch

from labinfer.functions.calls import CallSetting, FunctionCall, WeightCall, Work
from labinfer.functions.packed_experts import PackedExperts
from labinfer.functions.packed_weight import PackedWeight
from labinfer.functions.registry import Choice, FunctionRegistry, Implementation

PACKERS = {"linear": "pack_weight", "experts": "make_experts"}
"""Function → the function that packs its weights."""
MOST_CALLS = 16
"""Number of calls that are timed together for a target (see ``Choice``). More calls are timed only if more calls are distinct."""
SET_BYTES = 16 * 2**20
"""Bytes to which the weights of a target's calls are cut, so that timing takes equally long for models of any size."""
ROTATED_BYTES = 128 * 2**20
"""Bytes of weights that timed calls cycle through. A run reads weights from memory, as a step passes through all
layers; weights of a single layer would stay in the processor's cache."""


class RankCalls:
    """Function calls of this rank by target, and callables that make them with random arguments, for timing.

    The calls of a target are timed together: each distinct call is repeated in proportion to its count.

    Args:
        counts: how often a batch makes each call.
        overrides: implementation names by function, to consider only these.
    """

    def __init__(
        self,
        counts: Mapping[FunctionCall, int],
        registry: FunctionRegistry,
        setting: CallSetting,
        overrides: Mapping[str, str] | None = None,
    ):
        self.setting = setting
        self.counts: dict[str, dict[FunctionCall, int]] = {}
        for call, count in counts.items():
            self.counts.setdefault(call.target, {})[call] = count
        self.candidates: dict[str, dict[str, Implementation]] = {}
        self.quantization: dict[str, str] = {}
        """Quantization of the weights that each target reads."""
        self._pack: dict[str, dict[str, Callable]] = {}
        for target, calls in self.counts.items():
            function = target.rpartition(".")[2]
            kinds = {call.quantization for call in calls if isinstance(call, WeightCall)} or {"none"}
            if len(kinds) > 1:
                raise ValueError(f"{target} reads weights of {', '.join(sorted(kinds))}; give each its own target")
            self.quantization[target] = kind = kinds.pop()
            where = (setting.device, setting.dtype, overrides, kind)
            self.candidates[target] = registry.candidates(function, *where)
            if function in PACKERS:
                packing = registry.candidates(PACKERS[function], *where)
                self._pack[target] = {item.layout: item.call for item in packing.values()}
        self._weights: dict[tuple[str, str], list[list[PackedWeight | PackedExperts]]] = {}
        self._turn = itertools.count()

    def contested(self) -> dict[str, dict[str, Implementation]]:
        """Candidate implementations of each target that has several autotuned ones."""
        autotuned = {
            target: {name: item for name, item in candidates.items() if item.autotuned}
            for target, candidates in self.candidates.items()
        }
        return {target: candidates for target, candidates in autotuned.items() if len(candidates) > 1}

    def chosen_plugins(self, choice: Choice) -> Choice:
        """The part of ``choice`` for targets whose chosen implementations (or preferred one, if none is chosen) include
        a plugin's."""
        names = {target: choice.get(target, [*candidates][-1:]) for target, candidates in self.candidates.items()}
        return {
            target: chosen
            for target, chosen in names.items()
            if any(self.candidates[target][name].plugin for name in chosen)
        }

    def finish(self) -> None:
        """Wait until the device has finished; accelerators run asynchronously."""
        if self.setting.device.type != "cpu":
            torch.accelerator.synchronize(self.setting.device)

    def forget_weights(self) -> None:
        """Free the weights packed so far."""
        self._weights.clear()

    def bind(self, target: str, implementation: Implementation, rows: int) -> Callable[[], object]:
        """A callable that makes all calls of ``target`` once, with ``rows`` tokens; each time with the next of several
        sets of weights."""
        function = implementation.call
        if target in self._pack:
            return self._bind_weights(target, implementation, rows)
        bound = [call.bind(function, rows, self.setting) for call in self._sequence(target)]
        if len(bound) == 1:
            return bound[0]

        def run() -> None:
            for call in bound:
                call()

        return run

    def work(self, target: str, implementation: Implementation, rows: int) -> Work:
        """Lower bounds of memory traffic and arithmetic of the callable that ``bind`` returns."""
        if target not in self._pack:
            return sum((call.work(rows, self.setting) for call in self._sequence(target)), Work(0, 0))
        calls, weights = self._weight_calls(target), self._sets(target, implementation.layout)[0]
        total = Work(0, 0)
        for call, weight in zip(calls, weights, strict=True):
            total += call.work(rows, self.setting) + Work(call.read_bytes(weight.nbytes, rows), 0)
        return total

    def packed_bytes(self, target: str, implementation: Implementation) -> float:
        """Bytes of all weights of ``target`` that the rank has, packed for ``implementation``; an estimate from the timed weights."""
        timed, packed = self._weight_calls(target), self._sets(target, implementation.layout)[0]
        elements = sum(count * call.elements for call, count in self.counts[target].items())
        return elements * sum(weight.nbytes for weight in packed) / sum(call.elements for call in timed)

    def _sequence(self, target: str) -> list[FunctionCall]:
        """Calls of ``target`` that are timed together, each repeated in proportion to its count in lowest terms. If all
        layers are alike, these are the calls of one layer."""
        counts = self.counts[target]
        divisor = math.gcd(*counts.values())
        if sum(counts.values()) > MOST_CALLS * divisor:
            divisor = sum(counts.values()) / MOST_CALLS
        return [call for call, count in counts.items() for _ in range(max(1, round(count / divisor)))]

    # Calls that read weights.

    def _bind_weights(self, target: str, implementation: Implementation, rows: int) -> Callable[[], object]:
        sets = self._sets(target, implementation.layout)
        bound = [call.bind(implementation.call, rows, self.setting) for call in self._weight_calls(target)]

        def run() -> None:
            for call, weight in zip(bound, sets[next(self._turn) % len(sets)], strict=True):
                call(weight)

        return run

    def _weight_calls(self, target: str) -> list[WeightCall]:
        """The calls of ``_sequence``. If their weights together exceed ``SET_BYTES``, all matrices are cut by the same fraction."""
        calls = self._sequence(target)
        part = min(1.0, SET_BYTES / (sum(call.elements for call in calls) * self.setting.dtype.itemsize))
        return [call.cut(part) for call in calls]

    def _sets(self, target: str, layout: str) -> list[list[PackedWeight | PackedExperts]]:
        """Sets of packed weights for the calls of ``_weight_calls``: one packed set and its copies, of
        ``ROTATED_BYTES`` together, but not more weights than the rank has."""
        if (target, layout) not in self._weights:
            calls, pack = self._weight_calls(target), self._pack[target][layout]
            first = [call.pack(pack, self.setting) for call in calls]
            total = sum(count * call.elements for call, count in self.counts[target].items())
            most = total // sum(call.elements for call in calls)
            count = min(ROTATED_BYTES // sum(weight.nbytes for weight in first), most)
            self._weights[target, layout] = [
                first,
                *([weight.clone() for weight in first] for _ in range(count - 1)),
            ]
        return self._weights[target, layout]
