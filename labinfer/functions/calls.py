"""Descriptions of the function calls of a step, with the sizes of one rank, so that implementations can be timed.

A layer's ``calls()`` lists its calls; calls of mixtures of experts are in ``expert_calls``, of layers with a state in ``delta_calls`` and ``mamba_calls``.
Functions without a class here (packing, embedding, sampling, routing) are not autotuned: the reference has only one alternative, and the
preferred implementation is always used.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads, HeadNorms, QKVHeads
from labinfer.functions.layer_cache import LayerCache, TokenPool
from labinfer.functions.packed_weight import PackedWeight
from labinfer.functions.protocols import (
    AddRMSNorm,
    GeluAndMul,
    Linear,
    PackWeight,
    PagedAttention,
    RotateAndWrite,
    SiluAndMul,
)

CONTEXT = 256
"""Context length of each sequence before a timed step, in tokens."""
MOST_DECODES = 32
"""Maximum rows of a timed batch that are decodes of one sequence each; more rows are a chunk of one prompt, as in most batches."""
PATTERN = 1 << 20
"""Number of distinct random values, repeated to fill larger tensors: generating more takes longer than the calls to be timed."""


@dataclass(frozen=True)
class Work:
    """Lower bounds of a call's memory traffic and arithmetic, as for a roofline."""

    num_bytes: int
    """Memory traffic: bytes read and written."""
    operations: int
    """Multiplications and additions of matrix products; other arithmetic is not counted."""

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.operations + other.operations)


@dataclass(frozen=True, kw_only=True)
class CallSetting:
    """Device, dtypes and cache layout that all calls of a rank share."""

    device: torch.device
    dtype: torch.dtype
    """Dtype of activations."""
    kv_dtype: torch.dtype
    block_size: int
    """Tokens of a KV block."""
    tiled_cache: bool = False
    """Whether the selected functions use a tiled KV cache, see ``PoolLayout``."""

    def blocks_for(self, num_tokens: int) -> int:
        """KV blocks for ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def random(self, *shape: int) -> torch.Tensor:
        """Random activations or weights of ``shape``; contiguous."""
        count = math.prod(shape)
        pattern = torch.randn(min(count, PATTERN), device=self.device).to(self.dtype)
        return pattern.repeat(-(-count // len(pattern)))[:count].view(shape).contiguous()

    def empty_cache(self, blocks: int, kv_heads: int, head_size: int) -> LayerCache:
        """Make a KV cache of zeros with ``blocks`` blocks."""
        sizes = (blocks, self.block_size, (kv_heads, head_size))
        return LayerCache.zeros(*sizes, self.kv_dtype, device=self.device, tiled=self.tiled_cache)

    def batch(self, counts: Sequence[int]) -> AttentionBatch:
        """A batch in which sequence i has ``counts[i]`` new tokens after ``CONTEXT`` cached tokens."""
        lengths, blocks = [CONTEXT + count for count in counts], itertools.count()
        tables = [list(itertools.islice(blocks, self.blocks_for(length))) for length in lengths]
        return AttentionBatch.build([0, *itertools.accumulate(counts)], lengths, tables, self.device)

    def slots(self, rows: int) -> torch.Tensor:
        """Cache slots of ``rows`` new tokens, (T,) int64."""
        return torch.arange(rows, device=self.device)

    def fill(self, pools: Sequence[TokenPool], batch: AttentionBatch | None = None, *, window: int = 0) -> None:
        """Fill ``pools`` with values as in a run. Does nothing here: ``trial.TrialSetting`` overrides it.

        Args:
            batch: sequences that read the pools; None if the call writes them.
            window: sliding-window size in tokens; 0 for full attention.
        """

    def fill_states(self, states: torch.Tensor, batch: AttentionBatch) -> None:
        """Fill the state of each sequence of the batch, (B, …), with values as in a run. Does nothing here; see ``fill``."""


class FunctionCall(Protocol):
    """Description of a call of a function (such as attention) with the sizes of this rank's layers. Hashable: calls of
    equal sizes are equal and timed once."""

    @property
    def target(self) -> str:
        """Key of a ``Choice``: the function, with a prefix for the kind of matrix, such as ``layer.linear``."""
        ...

    def work(self, rows: int, setting: CallSetting) -> Work:
        """Lower bounds of memory traffic and arithmetic for ``rows`` tokens."""
        ...


class ArrayCall(FunctionCall, Protocol):
    """A call of a function that reads no packed weights."""

    def bind(self, function: Callable, rows: int, setting: CallSetting) -> Callable[[], object]:
        """A callable that calls ``function`` with random arguments of ``rows`` tokens."""
        ...


@runtime_checkable
class WeightCall(FunctionCall, Protocol):
    """A call of a function that reads packed weights."""

    @property
    def quantization(self) -> str: ...

    @property
    def elements(self) -> int:
        """Number of weights before packing."""
        ...

    def cut(self, part: float) -> WeightCall:
        """A smaller call that is timed in place of this one, with about the fraction ``part`` of the weights."""
        ...

    def pack(self, function: Callable, setting: CallSetting) -> Any:
        """Random weights, packed by ``function``."""
        ...

    def bind(self, function: Callable, rows: int, setting: CallSetting) -> Callable[[object], object]:
        """A callable that takes packed weights, and calls ``function`` with them and random activations of ``rows`` tokens."""
        ...

    def work(self, rows: int, setting: CallSetting) -> Work:
        """Work for ``rows`` tokens, without the bytes of the weights, which depend on the packing."""
        ...

    def read_bytes(self, packed_bytes: int, rows: int) -> int:
        """Bytes read for ``rows`` tokens from ``packed_bytes`` of packed weights."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinearCall:
    """A product with one matrix (outputs, inputs)."""

    target: str
    quantization: str
    outputs: int
    inputs: int

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs

    def cut(self, part: float) -> LinearCall:
        """A smaller product to time, with the fraction ``part`` of the outputs, rounded up to a multiple of 64."""
        return replace(self, outputs=min(self.outputs, math.ceil(self.outputs * part / 64) * 64))

    def pack(self, function: PackWeight, setting: CallSetting) -> PackedWeight:
        return function(setting.random(self.outputs, self.inputs))

    def bind(self, function: Linear, rows: int, setting: CallSetting) -> Callable[[PackedWeight], object]:
        x_TI = setting.random(rows, self.inputs)
        return lambda weight: function(x_TI, weight)

    def work(self, rows: int, setting: CallSetting) -> Work:
        return Work(rows * (self.outputs + self.inputs) * setting.dtype.itemsize, 2 * rows * self.elements)

    def read_bytes(self, packed_bytes: int, rows: int) -> int:
        return packed_bytes


@dataclass(frozen=True)
class AddRMSNormCall:
    """A call of ``add_rms_norm`` with hidden size ``size``."""

    size: int
    target = "add_rms_norm"

    def bind(self, function: AddRMSNorm, rows: int, setting: CallSetting) -> Callable[[], object]:
        hidden_TD, delta_TD = (setting.random(rows, self.size) for _ in range(2))
        weight_D = setting.random(self.size)
        return lambda: function(hidden_TD, delta_TD, weight_D, 1e-6)

    def work(self, rows: int, setting: CallSetting) -> Work:
        return Work(4 * rows * self.size * setting.dtype.itemsize, 0)


@dataclass(frozen=True)
class GatedActivationCall:
    """A call of a gated activation with ``columns`` MLP columns: ``silu_and_mul``, or a function of equal signature."""

    columns: int
    target: str = "silu_and_mul"

    def bind(self, function: SiluAndMul | GeluAndMul, rows: int, setting: CallSetting) -> Callable[[], object]:
        gate_up_TF = setting.random(rows, 2 * self.columns)
        return lambda: function(gate_up_TF)

    def work(self, rows: int, setting: CallSetting) -> Work:
        return Work(3 * rows * self.columns * setting.dtype.itemsize, 0)


@dataclass(frozen=True, kw_only=True)
class RotateAndWriteCall:
    """A call of ``rotate_and_write`` with this rank's heads."""

    heads: int
    """Query heads, H."""
    kv_heads: int
    head_size: int
    rotary_size: int
    """Dimensions of a head that are rotated; 0 for none."""
    interleaved: bool = False
    norms: Literal["none", "before", "after"] = "none"
    """Norms of the query and key heads, before or after the rotation."""
    value_norm: bool = False
    target = "rotate_and_write"

    def bind(self, function: RotateAndWrite, rows: int, setting: CallSetting) -> Callable[[], object]:
        qkv_THP = setting.random(rows, self.heads + 2 * self.kv_heads, self.head_size)
        angles = (setting.random(rows, self.rotary_size),) * 2 if self.rotary_size else None
        norms = None
        if self.norms != "none":
            q_P, k_P = (setting.random(self.head_size) for _ in range(2))
            norms = HeadNorms(q_P, k_P, 1e-6, after_rotation=self.norms == "after", values=self.value_norm)
        slots_T = setting.slots(rows)
        cache = setting.empty_cache(setting.blocks_for(int(slots_T.max()) + 1), self.kv_heads, self.head_size)
        setting.fill([cache.keys, cache.values])
        heads = QKVHeads(self.kv_heads, self.interleaved, norms)
        return lambda: function(qkv_THP, cache, slots_T, angles, heads)

    def work(self, rows: int, setting: CallSetting) -> Work:
        return Work(2 * rows * (self.heads + 2 * self.kv_heads) * self.head_size * setting.dtype.itemsize, 0)


@dataclass(frozen=True, kw_only=True)
class PagedAttentionCall:
    """A call of ``paged_attention`` with this rank's heads."""

    head_ptr: tuple[int, ...]
    """KV head k is read by query heads ``head_ptr[k]:head_ptr[k + 1]``."""
    head_size: int
    window: int
    """Sliding-window size in tokens, the token's own included; 0 for full attention."""
    sinks: bool = False
    """Whether each head has an attention-sink logit."""
    cap: float = 0.0
    """Soft cap of the scores; 0 for no cap."""
    target = "paged_attention"

    @property
    def heads(self) -> int:
        return self.head_ptr[-1]

    @property
    def kv_heads(self) -> int:
        return len(self.head_ptr) - 1

    def bind(self, function: PagedAttention, rows: int, setting: CallSetting) -> Callable[[], object]:
        batch = setting.batch(step_counts(rows))
        cache = setting.empty_cache(int(batch.tables_N.max()) + 1, self.kv_heads, self.head_size)
        setting.fill([cache.keys, cache.values], batch, window=self.window)
        q_THP = setting.random(rows, self.heads, self.head_size)
        sinks_H = setting.random(self.heads).float() if self.sinks else None
        heads = AttentionHeads(torch.tensor(self.head_ptr), self.head_size**-0.5, self.window, sinks_H, self.cap)
        return lambda: function(q_THP, cache, batch, heads)

    def work(self, rows: int, setting: CallSetting) -> Work:
        batch = setting.batch(step_counts(rows))
        seen = cached = 0
        for length, (begin, end) in zip(batch.context_lens, itertools.pairwise(batch.row_ptr), strict=True):
            positions = range(length - (end - begin), length)
            seen += sum(min(position + 1, self.window or length) for position in positions)
            cached += min(length, (self.window or length) + len(positions) - 1)
        cached_bytes = cached * 2 * self.kv_heads * self.head_size * setting.kv_dtype.itemsize
        activations = 2 * rows * self.heads * self.head_size * setting.dtype.itemsize
        return Work(cached_bytes + activations, 4 * self.heads * self.head_size * seen)


def step_counts(rows: int) -> list[int]:
    """Number of new tokens of each sequence in a timed step with ``rows`` tokens."""
    return [1] * rows if rows <= MOST_DECODES else [rows]


@runtime_checkable
class CallLister(Protocol):
    """A module that lists the function calls that it makes."""

    def calls(self) -> Iterator[FunctionCall]:
        """Calls that the module makes for every batch, its children excluded."""
        ...


def collect_calls(model: nn.Module) -> Counter[FunctionCall]:
    """Calls of a model's modules, with the number of times a batch makes each."""
    return Counter(call for module in model.modules() if isinstance(module, CallLister) for call in module.calls())
