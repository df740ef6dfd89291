"""Trials: comparison of implementations with the reference on the CPU, before a run uses them.

The implementation and the reference get equal random arguments. Caches are as in a run: blocks in any order, and NaN in every slot that
no token of the batch, nor an earlier token of its sequences, has written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Literal

import msgspec
import torch
import torch.nn.functional as F

from labinfer.base.plugins import PLUGINS, describe_error
from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.calls import CONTEXT, CallSetting, FunctionCall, WeightCall
from labinfer.functions.layer_cache import TokenPool
from labinfer.functions.packed_weight import QuantizedWeight
from labinfer.functions.rank_calls import PACKERS
from labinfer.functions.reference.experts import ReferenceExperts
from labinfer.functions.reference.quantized import dequantize
from labinfer.functions.registry import FunctionRegistry, Implementation
from labinfer.functions.trial_results import TrialResult, dtype_tolerance, first_difference

TRIED_ROWS = (3, 40, 1)
"""Batch sizes in tokens. 3: a decode, a prompt of one token, and a chunk of one token of another prompt; 40: a decode, a prompt, and a
chunk of another prompt; 1: a decode."""
SPARE_BLOCKS = 3
MATRIX_BYTES = 1 << 20
"""Bytes to which larger weight matrices are cut."""
CACHE_TARGETS = ("rotate_and_write", "paged_attention", "write_latent", "latent_attention")
"""Functions that read or write a KV cache: only these are tried in several dtypes of the cache."""
CPU = torch.device("cpu")
TIMED_CALLS = 5

Verdict = Literal["works", "wrong", "raises", "crashes", "hangs", "lacks memory", "not tried", "unknown"]
PASSING = ("works", "unknown")
"""Each ``Verdict`` with which an implementation is kept."""
TRANSIENT = ("lacks memory", "not tried")
"""Verdicts that may differ at the next program start, so they are not cached."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a ``TrialCase``: whether the results of one implementation match those of the reference."""

    function: str
    name: str
    """Name of the implementation."""
    quantization: str
    dtype: str
    kv_dtype: str
    rows: int
    """Number of tokens in the tried call."""
    verdict: Verdict
    detail: str = ""
    """The difference from the reference, or the error; empty if it works."""
    seconds: float = 0.0
    """Minimum seconds of a call of the implementation; 0 if not measured."""
    reference_seconds: float = 0.0
    """Minimum time of the reference on the same device; 0 if not measured."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Function, name and quantization of the implementation."""
        return self.function, self.name, self.quantization

    @property
    def text(self) -> str:
        """Function, implementation and what is wrong with it, as a sentence."""
        tokens = f"{self.rows} token{'s' * (self.rows > 1)} in {self.dtype}"
        if self.verdict == "not tried":
            return f"{self.function}={self.name} not tried: {self.detail}"
        verb = "" if self.verdict == "wrong" else f"{self.verdict}: "
        return f"{self.function}={self.name} {verb}{self.detail}, for {tokens}"


@dataclass(frozen=True, kw_only=True)
class TrialSetting(CallSetting):
    """A ``CallSetting`` with reproducible random arguments, and NaN in memory that no token has written."""

    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))
    written: list[Callable[[], torch.Tensor]] = field(default_factory=list)
    """Functions that return the contents of each pool and state after the call."""

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def batch(self, counts: Sequence[int]) -> AttentionBatch:
        """A batch of ``sum(counts)`` new tokens: a decode, a new prompt and a chunk of another prompt, with their blocks
        in random order."""
        num_prompt = (sum(counts) - 1) // 2
        sequences = [(1, CONTEXT), (num_prompt, 0), (sum(counts) - 1 - num_prompt, 5)]
        sequences = [(count, before) for count, before in sequences if count]
        lengths = [before + count for count, before in sequences]
        numbers = [self.blocks_for(length) for length in lengths]
        blocks = iter(torch.randperm(sum(numbers) + SPARE_BLOCKS, generator=self.generator).tolist())
        tables = [[next(blocks) for _ in range(number)] for number in numbers]
        row_ptr = [0, *accumulate(count for count, _ in sequences)]
        return AttentionBatch.build(row_ptr, lengths, tables, self.device)

    def slots(self, rows: int) -> torch.Tensor:
        return torch.randperm(3 * rows + self.block_size, generator=self.generator)[:rows].to(self.device)

    def fill(self, pools: Sequence[TokenPool], batch: AttentionBatch | None = None, *, window: int = 0) -> None:
        for pool in pools:
            (pool.data if pool.scale is None else pool.scale).fill_(torch.nan)
            blocks = torch.arange(len(pool.data), device=self.device)
            if batch is not None:
                slots_T = self._written_slots(batch, window).to(self.device)
                pool.store(self.random(len(slots_T), *pool.load(blocks[:1], self.dtype).shape[1:]), slots_T)
            self.written.append(lambda pool=pool, blocks=blocks: pool.load(blocks, torch.float32))

    def fill_states(self, states: torch.Tensor, batch: AttentionBatch) -> None:
        for index, length in enumerate(batch.context_lens):
            is_new = length == batch.row_ptr[index + 1] - batch.row_ptr[index]
            states[index] = torch.nan if is_new else self.random(*states.shape[1:])
        self.written.append(lambda: states)

    def slot(self, table: Sequence[int], position: int) -> int:
        """Cache slot of the token at ``position`` of a sequence with this block table."""
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _written_slots(self, batch: AttentionBatch, window: int) -> torch.Tensor:
        """Slots that may be read: slots of the batch's sequences, from the first block that a new token attends to."""
        slots = []
        for index, length in enumerate(batch.context_lens):
            table = batch.tables_N[batch.table_ptr[index] : batch.table_ptr[index + 1]].tolist()
            num_new = batch.row_ptr[index + 1] - batch.row_ptr[index]
            first = max(0, length - num_new - window + 1) // self.block_size * self.block_size if window else 0
            slots += [self.slot(table, position) for position in range(first, length)]
        return torch.tensor(slots)


@dataclass(frozen=True, kw_only=True)
class TrialCase:
    """One call of one implementation, to be compared with the reference."""

    call: FunctionCall
    item: Implementation
    pack: Callable | None
    """Packs the weights of the call in the layout that ``item`` reads; None for functions without packed weights."""
    setting: CallSetting
    rows: int
    quantization: str

    @property
    def function(self) -> str:
        return self.call.target.rpartition(".")[2]

    @property
    def key(self) -> tuple[str, str, str]:
        """Function, name and quantization of the implementation."""
        return self.function, self.item.name, self.quantization

    def finding(self, verdict: Verdict, detail: str = "", seconds: Sequence[float] = (0.0, 0.0)) -> Finding:
        """Make the ``Finding`` of this case."""
        return Finding(
            function=self.function,
            name=self.item.name,
            quantization=self.quantization,
            dtype=dtype_name(self.setting.dtype),
            kv_dtype=dtype_name(self.setting.kv_dtype),
            rows=self.rows,
            verdict=verdict,
            detail=detail,
            seconds=seconds[0],
            reference_seconds=seconds[1],
        )


def is_tried(item: Implementation, device: torch.device) -> bool:
    """Whether an implementation is tried before a run uses it: true for implementations of plugins and of accelerators. The CPU kernels that
    LABInfer ships have unit tests instead."""
    return bool(item.plugin) or bool(item.devices) and device.type != "cpu"


def make_cases(
    registry: FunctionRegistry,
    settings: Iterable[CallSetting],
    calls: Sequence[FunctionCall],
    is_tried: Callable[[Implementation, torch.device], bool] = is_tried,
) -> Iterator[TrialCase]:
    """Cases of all implementations to try, in an order that depends on the arguments only: first one for each implementation and call,
    then those with other numbers of tokens."""
    settings = tuple(settings)
    for rows in TRIED_ROWS:
        for setting in settings:
            for call in calls:
                function = call.target.rpartition(".")[2]
                if setting.kv_dtype != setting.dtype and function not in CACHE_TARGETS and setting is not settings[0]:
                    continue
                quantization = getattr(call, "quantization", "none")
                where = (setting.device, setting.dtype, None, quantization)
                packer = getattr(call, "packer", PACKERS.get(function))
                packers = {each.layout: each for each in registry.candidates(packer, *where).values()} if packer else {}
                if isinstance(call, WeightCall):
                    call = call.cut(min(1.0, MATRIX_BYTES / max(1, call.elements * setting.dtype.itemsize)))
                for item in registry.candidates(function, *where).values():
                    pack = packers.get(item.layout)
                    if packer and pack is None:
                        continue
                    if is_tried(item, setting.device) or pack is not None and is_tried(pack, setting.device):
                        yield TrialCase(
                            call=call,
                            item=item,
                            pack=None if pack is None else pack.call,
                            setting=setting,
                            rows=rows,
                            quantization=quantization,
                        )


class Trials:
    """Runs trial cases.

    Args:
        reference: registry of the reference, for the CPU.
        is_timed: whether to time implementations that work, and the reference on the same device.
    """

    def __init__(self, reference: FunctionRegistry, *, is_timed: bool = False):
        self._reference, self._is_timed = reference, is_timed
        self._expected: dict[tuple, list[list[TrialResult]]] = {}

    def run(self, case: TrialCase) -> Finding:
        """Compare one implementation with the reference in one case; it may raise anything."""
        try:
            expected = self._expect(case)
        except Exception as error:  # noqa: BLE001 - an error of the reference is no fault of the implementation
            return case.finding("unknown", f"the reference has no such call: {describe_error(error)}")
        try:
            with PLUGINS.blame(case.item.plugin):
                results = _run(case.call, case.item.call, case.pack, case.rows, case.setting)
        except Exception as error:  # noqa: BLE001 - kernels raise whatever their libraries raise
            return case.finding("lacks memory" if _lacks_memory(error) else "raises", describe_error(error))
        problems = [first_difference(results, right, case.item.tolerance) for right in expected]
        if all(problems):
            packed = f" (with its {case.call.packer})" if hasattr(case.call, "packer") else ""
            return case.finding("wrong", problems[0] + packed)
        return case.finding("works", "", self._time(case) if self._is_timed else (0.0, 0.0))

    def _expect(self, case: TrialCase) -> list[list[TrialResult]]:
        """Results that are accepted: the reference's, and for quantized weights also results without rounding of the inputs to 8 bits."""
        key = (case.call, case.rows, case.setting)
        if key not in self._expected:
            setting = replace(case.setting, device=CPU)
            self._expected = {
                key: [
                    _run(case.call, function, pack, case.rows, setting)
                    for function, pack in self._judges(case, setting)
                ]
            }
        return self._expected[key]

    def _judges(self, case: TrialCase, setting: CallSetting) -> Iterator[tuple[Callable, Callable | None]]:
        """Reference functions whose results the case may match, each with the function that packs its weights, if any."""

        def find(function: str) -> Callable | None:
            weights = (
                case.quantization if function in (*PACKERS, *PACKERS.values(), "pack_codes", "embedding") else "none"
            )
            known = self._reference.candidates(function, CPU, setting.dtype, None, weights)
            return known["reference"].call if known else None

        function, packer = case.function, getattr(case.call, "packer", PACKERS.get(case.function))
        if packer is None:
            yield find(function), None
            return
        if function == "embedding":
            yield find(function), find(packer)
            return
        linears = [find("linear"), *([_exact_linear] if case.quantization != "none" else [])]
        for linear in linears:
            if function == "experts":
                yield find(function), partial(ReferenceExperts, find("pack_weight"), linear, find("pack_codes"))
            elif function == "gated_linear":
                gates = find("silu_and_mul"), find("gelu_and_mul")
                yield partial(_gated_linear, linear, gates), find(packer)
            else:
                yield linear, find(packer)

    def _time(self, case: TrialCase) -> tuple[float, float]:
        """Minimum seconds of the implementation and of the reference on its device; zeros if the reference cannot run there."""
        setting = case.setting
        where = (setting.device, setting.dtype, None, case.quantization)
        try:
            known = self._reference.candidates(case.function, *where)
            packer = getattr(case.call, "packer", PACKERS.get(case.function))
            packers = self._reference.candidates(packer, *where) if packer else {}
            pack = packers["reference"].call if packers else None
            pairs = [(case.item.call, case.pack), (known["reference"].call, pack)]
            own, reference = (_seconds(case.call, *pair, case.rows, setting) for pair in pairs)
            return own, reference
        except Exception:  # noqa: BLE001 - the reference may lack an operation on this device, which its own case reports
            return 0.0, 0.0


def _lacks_memory(error: Exception) -> bool:
    """Whether an error says that the memory of the host or of the device is exhausted."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower()


def _gated_linear(
    linear: Callable, gates: Sequence[Callable], x_TI: torch.Tensor, weight, bias_O=None, *, gelu: bool = False
) -> torch.Tensor:
    return gates[gelu](linear(x_TI, weight, bias_O))


def _exact_linear(x_TI: torch.Tensor, weight: QuantizedWeight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Product with the dequantized matrix, in float32, without rounding of the inputs to 8 bits."""
    return F.linear(x_TI.float(), dequantize(weight), None if bias_O is None else bias_O.float()).to(x_TI.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _bind(
    call: FunctionCall, function: Callable, pack: Callable | None, rows: int, setting: CallSetting
) -> Callable[[], object]:
    """A callable without arguments that makes ``call`` with ``function``."""
    bound = call.bind(function, rows, setting)
    return bound if pack is None else partial(bound, call.pack(pack, setting))


def _run(
    call: FunctionCall, function: Callable, pack: Callable | None, rows: int, setting: CallSetting
) -> list[TrialResult]:
    """Outputs of a call, then the contents of its pools and states; on the CPU."""
    own = TrialSetting(**vars(setting))
    with torch.inference_mode():
        out = _bind(call, function, pack, rows, own)()
        outputs = [
            TrialResult(each.to(CPU), dtype_tolerance(each.dtype))
            for each in (out if isinstance(out, tuple) else [out])
        ]
        tolerance = max(dtype_tolerance(dtype) for dtype in (setting.dtype, setting.kv_dtype))
        return [*outputs, *(TrialResult(read().to(CPU), tolerance, is_memory=True) for read in own.written)]


def _seconds(call: FunctionCall, function: Callable, pack: Callable | None, rows: int, setting: CallSetting) -> float:
    """Minimum seconds of a call, after a warm-up call."""
    times = []
    with torch.inference_mode():
        bound = _bind(call, function, pack, rows, setting)
        for _ in range(TIMED_CALLS):
            begin = time.perf_counter()
            bound()
            if setting.device.type != "cpu":
                torch.accelerator.synchronize(setting.device)
            times.append(time.perf_counter() - begin)
    return min(times[1:])
