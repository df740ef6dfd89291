"""check_plugins: comparison of plugins' implementations with the reference, before a run uses them.

The implementation and the reference get equal random arguments of the rank's sizes. Caches are as in a run: blocks in any order, and NaN
in every slot that no token of the batch, nor an earlier token of its sequences, has written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from labinfer.base.errors import UserError
from labinfer.base.plugins import FLAG, PLUGINS
from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.calls import CONTEXT, CallSetting, FunctionCall, WeightCall
from labinfer.functions.layer_cache import TokenPool
from labinfer.functions.rank_calls import PACKERS, SET_BYTES, RankCalls
from labinfer.functions.registry import FunctionRegistry, Implementation

TOLERANCES = {4: 1e-4, 2: 0.02, 1: 0.02}
"""Maximum error, relative to the largest magnitude in the reference's result, by bytes per element."""
CHECKED_ROWS = (1, 3, 40)
"""Batch sizes in tokens: one decode; a decode, a prompt of one token and one more token of another prompt; and a decode, a prompt
and a chunk of another prompt."""
SPARE_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class CheckSetting(CallSetting):
    """A ``CallSetting`` with reproducible random arguments, and NaN in memory that no token has written."""

    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))
    written: list[Callable[[], torch.Tensor]] = field(default_factory=list)
    """Functions that return the contents of each pool and state after the call."""

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def batch(self, counts: Sequence[int]) -> AttentionBatch:
        """A batch of ``sum(counts)`` new tokens: a decode, a new prompt and a chunk of another prompt, with their blocks
        in random order."""
        num_prompt = (sum(counts) - 1) // 2
        sequences = [(1, CONTEXT), (num_prompt, 0), (sum(counts) - 1 - num_prompt, 5)]
        sequences = [(count, before) for count, before in sequences if count]
        lengths = [before + count for count, before in sequences]
        numbers = [-(-length // self.block_size) for length in lengths]
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
                slots_T = _written_slots(batch, window, self.block_size).to(self.device)
                pool.store(self.random(len(slots_T), *pool.load(blocks[:1], self.dtype).shape[1:]), slots_T)
            self.written.append(lambda pool=pool, blocks=blocks: pool.load(blocks, torch.float32))

    def fill_states(self, states: torch.Tensor, batch: AttentionBatch) -> None:
        for index, length in enumerate(batch.context_lens):
            is_new = length == batch.row_ptr[index + 1] - batch.row_ptr[index]
            states[index] = torch.nan if is_new else self.random(*states.shape[1:])
        self.written.append(lambda: states)


def check_plugins(calls: RankCalls, registry: FunctionRegistry) -> None:
    """Compare each plugin implementation that this rank's layers may call with the reference.

    Functions that no ``calls()`` lists are not compared: packing, embedding, routing, sampling.

    Raises:
        UserError: results differ by more than the implementation's tolerance, or the implementation raises.
    """
    for target, candidates in calls.candidates.items():
        for item in candidates.values():
            if item.plugin:
                for call in calls.counts[target]:
                    _compare(call, item, calls, registry)


def _compare(call: FunctionCall, item: Implementation, calls: RankCalls, registry: FunctionRegistry) -> None:
    """Compare one implementation with the reference, for one call.

    Raises:
        UserError: results differ by more than the implementation's tolerance, or the implementation raises.
    """
    function, setting = call.target.rpartition(".")[2], calls.setting
    where = (setting.device, setting.dtype, None, calls.quantization[call.target])
    known = registry.candidates(function, *where)
    reference = known.get("reference") or next(iter(known.values()))
    pack: dict[str, Callable] = {}
    if isinstance(call, WeightCall):
        call = call.cut(min(1.0, SET_BYTES / (call.elements * setting.dtype.itemsize)))
        pack = {packer.layout: packer.call for packer in registry.candidates(PACKERS[function], *where).values()}
    for rows in CHECKED_ROWS:
        expected = _run(call, reference, pack, rows, setting)
        with PLUGINS.blame(item.plugin):
            results = _run(call, item, pack, rows, setting)
            assert len(results) == len(expected), f"{item.name} gives {len(results)} tensors, not {len(expected)}"
        for result, right in zip(results, expected, strict=True):
            if problem := _difference(result, right, item.tolerance):
                tokens = f"{rows} token{'s' * (rows > 1)} in {str(setting.dtype).removeprefix('torch.')}"
                raise UserError(
                    f"{FLAG} {item.plugin}: {function}={item.name} {problem}, for {tokens}; fix it, or leave the "
                    "plugin out"
                )


@dataclass(frozen=True)
class _Result:
    """A tensor that a call returns, or the contents of memory that it reads and writes."""

    values: torch.Tensor
    tolerance: float
    is_memory: bool = False


def _run(
    call: FunctionCall, item: Implementation, pack: Mapping[str, Callable], rows: int, setting: CallSetting
) -> list[_Result]:
    """Make a call. Returns its outputs, then the contents of its pools and states."""
    own = CheckSetting(**vars(setting))
    with torch.inference_mode():
        bound = call.bind(item.call, rows, own)
        out = bound(call.pack(pack[item.layout], own)) if pack else bound()
        outputs = [
            _Result(each, TOLERANCES[each.dtype.itemsize]) for each in (out if isinstance(out, tuple) else [out])
        ]
        tolerance = max(TOLERANCES[dtype.itemsize] for dtype in (setting.dtype, setting.kv_dtype))
        return [*outputs, *(_Result(read(), tolerance, is_memory=True) for read in own.written)]


def _difference(result: _Result, right: _Result, tolerance: float | None) -> str:
    """Difference of a result from the reference's, as the predicate of a sentence; empty if within the tolerance."""
    got, expected = result.values, right.values
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"gives {tuple(got.shape)} in {got.dtype}, not {tuple(expected.shape)} in {expected.dtype}"
    if (got.isnan() & ~expected.isnan()).any():
        return "gives NaN where the reference gives numbers; it may read memory that no token has written"
    if (expected.isnan() & ~got.isnan()).any():
        return "writes to memory of other tokens"
    got, expected = got.float().nan_to_num(), expected.float().nan_to_num()
    error = float((got - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    limit = tolerance or right.tolerance
    place = "leaves other numbers in memory than" if result.is_memory else "differs from"
    return (
        "" if error <= limit else f"{place} the reference by {error:.2g} times its largest number, more than {limit:g}"
    )


def _written_slots(batch: AttentionBatch, window: int, block_size: int) -> torch.Tensor:
    """Slots that may be read: those of the batch's sequences, from the first block that a new token attends to."""
    slots = []
    for index, length in enumerate(batch.context_lens):
        table = batch.tables_N[batch.table_ptr[index] : batch.table_ptr[index + 1]].tolist()
        num_new = batch.row_ptr[index + 1] - batch.row_ptr[index]
        first = max(0, length - num_new - window + 1) // block_size * block_size if window else 0
        slots += [table[place // block_size] * block_size + place % block_size for place in range(first, length)]
    return torch.tensor(slots)
