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
"""Maximum number of calls timed as one, unless more of them are distinct."""
SET_BYTES = 16 * 2**20
"""Size to which larger matrices are cut, so that timing takes equally long for models of any size."""
ROTATED_BYTES = 128 * 2**20
"""Bytes of weights that timed calls cycle through. A model runs through all its layers, so it reads weights from memory; those of a
single layer would stay in the processor's cache."""


class RankCalls:
    """Calls by target, and callables that make them with random arguments.

    The calls of a target are timed as one: each distinct call is repeated in proportion to its count.

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
        """The chosen names (or the preferred candidate) of the targets for which these include a plugin's implementation."""
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
        """A callable that makes the target's calls once, and cycles through several sets of weights."""
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
        """Least work of one call of what ``bind`` returns."""
        if target not in self._pack:
            return sum((call.work(rows, self.setting) for call in self._sequence(target)), Work(0, 0))
        calls, weights = self._weight_calls(target), self._sets(target, implementation.layout)[0]
        total = Work(0, 0)
        for call, weight in zip(calls, weights, strict=True):
            total += call.work(rows, self.setting) + Work(call.read_bytes(weight.nbytes, rows), 0)
        return total

    def _sequence(self, target: str) -> list[FunctionCall]:
        """The calls of a target, repeated in proportion to their counts in lowest terms: the calls of one layer if all layers are alike."""
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
        """The calls of ``_sequence``, with their weights cut to ``SET_BYTES`` in total."""
        calls = self._sequence(target)
        part = min(1.0, SET_BYTES / (sum(call.elements for call in calls) * self.setting.dtype.itemsize))
        return [call.cut(part) for call in calls]

    def _sets(self, target: str, layout: str) -> list[list[PackedWeight | PackedExperts]]:
        """Packed weights for the sequence, cloned up to ``ROTATED_BYTES``, but no more weights than the rank really has."""
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
