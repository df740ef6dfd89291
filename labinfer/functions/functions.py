"""``Functions``: one implementation of every function, passed to the layers' constructors.

Functions whose protocols are in ``family_protocols.py`` are typed as ``Callable`` here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from labinfer.functions.protocols import (
    AddRMSNorm,
    Argmax,
    Embedding,
    GatedLinear,
    GeluAndMul,
    Linear,
    PackWeight,
    PagedAttention,
    RotateAndWrite,
    Sample,
    SiluAndMul,
)

MatrixKind = Literal["layer", "vocabulary", "expert", "exact"]
"""Kinds of matrices, which may be quantized differently: projections of layers; embedding and LM head; experts of a mixture; and
matrices that are never quantized because they are small and sensitive, such as routers."""


@dataclass(frozen=True, kw_only=True)
class MatrixFunctions:
    """Functions of one weight layout: packing, and the products and lookups that read it."""

    pack_weight: PackWeight
    linear: Linear
    gated_linear: GatedLinear | None
    """Fused gated product; None if layers call ``linear`` and the activation one after the other, with an equal result."""
    embedding: Embedding
    target: str
    """Key of ``linear`` in a ``Choice``, such as ``layer.linear``."""
    quantization: str
    pack_codes: Callable | None = None
    """Packs a checkpoint's quantized weights; None if the weight layout does not support them."""
    packing: str = ""
    """Name of the packing implementation, its layout and quantization."""


@dataclass(frozen=True, kw_only=True)
class ExpertFunctions:
    """Allocation of packed experts, and the kernel that reads their weight layout."""

    make_experts: Callable
    experts: Callable
    target: str
    """Key of ``experts`` in a ``Choice``."""
    quantization: str
    packing: str = ""
    """Name of the packing implementation, its layout and quantization."""


@dataclass(frozen=True, kw_only=True)
class Functions:
    """One implementation of every function, for one device and dtype."""

    matrices: Mapping[MatrixKind, MatrixFunctions]
    codes: Mapping[str, MatrixFunctions]
    """Quantization → functions for matrices of any kind that the checkpoint holds quantized."""
    experts: ExpertFunctions
    coded_experts: Mapping[str, ExpertFunctions]
    """Quantization → functions for experts that the checkpoint holds quantized."""
    add_rms_norm: AddRMSNorm
    silu_and_mul: SiluAndMul
    gelu_and_mul: GeluAndMul
    rotate_and_write: RotateAndWrite
    paged_attention: PagedAttention
    tiled_cache: bool = False
    """Whether ``rotate_and_write`` and ``paged_attention`` are fastest with a tiled KV cache; every implementation also takes a KV cache without tiles."""
    argmax: Argmax
    sample: Sample
    route: Callable
    write_latent: Callable
    latent_attention: Callable
    causal_conv: Callable
    delta_rule: Callable
    gated_norm: Callable
    selective_scan: Callable
    gated_group_norm: Callable
    """The fields from ``route`` to this one are functions of ``family_protocols.py``, for layers of ``models/families``."""
