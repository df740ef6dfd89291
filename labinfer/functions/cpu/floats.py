"""Compiled functions for floating-point models; bfloat16 matrices with an odd number of inputs are padded by one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from labinfer.functions.attention_batch import Angles, AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads, HeadNorms, QKVHeads
from labinfer.functions.cpu.dense import Finish, look_up, multiply, sum_products
from labinfer.functions.cpu.library import Library
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.packed_weight import DenseWeight
from labinfer.functions.segmented_weight import SegmentedWeight

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int8)
"""Dtypes of activations and caches, in the order of their enum values in attention_inner.h; int8 is for caches."""


class CompiledNorms(ctypes.Structure):
    """C++ struct of elementwise.cpp for ``HeadNorms``, declared for ctypes."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("after_rotation", ctypes.c_int32),
        ("is_wide", ctypes.c_int32),
        ("values", ctypes.c_int32),
    ]

    @classmethod
    def convert(cls, norms: HeadNorms) -> CompiledNorms:
        is_wide = norms.q_P.dtype == torch.float32
        return cls(norms.q_P.data_ptr(), norms.k_P.data_ptr(), norms.eps, norms.after_rotation, is_wide, norms.values)


class CpuFunctions:
    """Each method implements the function of equal name; ``protocols`` documents the arguments.

    Args:
        library: see ``library.load``.
        kernel: kernel of bfloat16 products, one of ``library.kernels``.
        dtype: dtype of activations and weights. All sums are in float32.
    """

    dtypes = (torch.bfloat16, torch.float32, torch.float16)

    def __init__(self, library: Library, kernel: str = "", dtype: torch.dtype = torch.bfloat16):
        self.kernel, self._library, self._dtype = kernel, library, DTYPES.index(dtype)
        self._attend = library.find("attend", kernel)
        name = str(dtype).removeprefix("torch.")
        self._norm = getattr(library, f"add_rms_norm_{name}")
        self._silu, self._gelu = getattr(library, f"silu_and_mul_{name}"), getattr(library, f"gelu_and_mul_{name}")
        self._rotate = getattr(library, f"rotate_and_write_{name}")
        self._are_pairs = dtype == torch.bfloat16
        if self._are_pairs:
            self._pack, self._look_up = library.pack_weight, library.embedding
            self._linear, self._sum = library.find("linear", kernel), library.find("sum_linear", kernel)
        else:
            self._pack, self._look_up = getattr(library, f"pack_{name}"), getattr(library, f"embedding_{name}")
            self._linear, self._sum = getattr(library, f"linear_{name}"), getattr(library, f"sum_linear_{name}")

    def calls(self) -> dict[str, Callable]:
        """Function name → method of this object that implements the function."""
        names = ("embedding", "linear", "pack_weight", "add_rms_norm", "silu_and_mul", "gelu_and_mul")
        gated = ("gated_linear",) if self._are_pairs else ()  # otherwise layers call linear, then the activation
        return {name: getattr(self, name) for name in (*names, *gated, "rotate_and_write", "paged_attention")}

    def pack_weight(self, weight_OI: torch.Tensor) -> DenseWeight:
        outputs, inputs = weight_OI.shape
        if self._is_padded(inputs):
            weight_OI = F.pad(weight_OI, (0, 1))
        self._pack(weight_OI.data_ptr(), *weight_OI.shape, torch.get_num_threads())
        return DenseWeight(weight_OI, outputs, inputs)

    def linear(
        self, x_TI: torch.Tensor, weight: DenseWeight | SegmentedWeight, bias_O: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, SegmentedWeight):
            return sum_products(self._sum, x_TI, weight)
        return multiply(self._linear, x_TI, weight, bias_O)

    def gated_linear(
        self, x_TI: torch.Tensor, weight: DenseWeight, bias_O: torch.Tensor | None = None, *, gelu: bool = False
    ) -> torch.Tensor:
        finish = Finish.gate(gelu)
        if not self._are_pairs or not finish.takes(weight.outputs):
            return self.activate(self.linear(x_TI, weight, bias_O), gelu)
        return multiply(self._linear, x_TI, weight, bias_O, finish)

    def activate(self, gate_up_TF: torch.Tensor, gelu: bool) -> torch.Tensor:
        """Apply ``gelu_and_mul`` if ``gelu``, else ``silu_and_mul``."""
        return _gate(self._gelu if gelu else self._silu, gate_up_TF)

    def embedding(self, token_ids_T: torch.Tensor, table: DenseWeight, first: int) -> torch.Tensor:
        if self._is_padded(table.inputs):
            wide_TI = look_up(self._look_up, token_ids_T, replace(table, inputs=table.inputs + 1), first)
            return wide_TI[:, : table.inputs].contiguous()
        return look_up(self._look_up, token_ids_T, table, first)

    def _is_padded(self, inputs: int) -> bool:
        """Whether a matrix with ``inputs`` inputs is padded by an input of zeros: bfloat16 panels have an even number of inputs."""
        return self._are_pairs and inputs % 2 == 1

    def add_rms_norm(
        self, hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_TD = hidden_TD.contiguous()
        out_TD = torch.empty_like(hidden_TD)
        self._norm(
            hidden_TD.data_ptr(),
            None if delta_TD is None else delta_TD.data_ptr(),
            weight_D.data_ptr(),
            out_TD.data_ptr(),
            *hidden_TD.shape,
            eps,
            weight_D.dtype == torch.float32,
            torch.get_num_threads(),
        )
        return hidden_TD, out_TD

    def silu_and_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        return _gate(self._silu, gate_up_TF)

    def gelu_and_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        return _gate(self._gelu, gate_up_TF)

    def rotate_and_write(
        self, qkv_THP: torch.Tensor, cache: LayerCache, slots_T: torch.Tensor, angles: Angles | None, heads: QKVHeads
    ) -> torch.Tensor:
        tokens, num_heads, size = qkv_THP.shape
        num_kv = heads.num_kv
        num_queries = num_heads - 2 * num_kv
        q_THP = qkv_THP.new_empty(tokens, num_queries, size)
        cos = sin = compiled_norms = None
        rotated = 0
        if angles is not None:
            cos_TR, sin_TR = angles
            cos, sin, rotated = cos_TR.data_ptr(), sin_TR.data_ptr(), cos_TR.shape[1]
        if heads.norms is not None:
            compiled_norms = ctypes.byref(CompiledNorms.convert(heads.norms))
        self._rotate(
            qkv_THP.data_ptr(),
            cos,
            sin,
            compiled_norms,
            slots_T.data_ptr(),
            q_THP.data_ptr(),
            *_addresses(cache),
            tokens,
            num_queries,
            num_kv,
            size,
            rotated,
            heads.interleaved,
            DTYPES.index(cache.k.dtype),
            cache.block_size,
            cache.is_tiled,
            torch.get_num_threads(),
        )
        return q_THP

    def paged_attention(
        self, q_THP: torch.Tensor, cache: LayerCache, batch: AttentionBatch, heads: AttentionHeads
    ) -> torch.Tensor:
        head_ptr, sinks_H = heads.head_ptr, heads.sinks_H
        q_THP = q_THP.contiguous()
        out_THP = torch.empty_like(q_THP)
        self._attend(
            q_THP.data_ptr(),
            *_addresses(cache),
            batch.tables_N.data_ptr(),
            batch.table_ptr_B.data_ptr(),
            batch.row_ptr_B.data_ptr(),
            batch.context_lens_B.data_ptr(),
            head_ptr.data_ptr(),
            None if sinks_H is None else sinks_H.data_ptr(),
            out_THP.data_ptr(),
            len(batch.context_lens),
            q_THP.shape[1],
            len(head_ptr) - 1,
            q_THP.shape[2],
            cache.block_size,
            self._dtype,
            DTYPES.index(cache.k.dtype),
            cache.is_tiled,
            heads.scale,
            heads.cap,
            heads.window,
            torch.get_num_threads(),
        )
        return out_THP


def _gate(activate: Callable, gate_up_TF: torch.Tensor) -> torch.Tensor:
    tokens, columns = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    out_TF = gate_up_TF.new_empty(tokens, columns)
    activate(gate_up_TF.data_ptr(), out_TF.data_ptr(), tokens, columns, torch.get_num_threads())
    return out_TF


def _addresses(cache: LayerCache) -> tuple[int | None, ...]:
    """Addresses of keys, of scales of keys, of values, and of scales of values."""
    parts = (cache.k, cache.k_scale, cache.v, cache.v_scale)
    return tuple(None if part is None else part.data_ptr() for part in parts)
