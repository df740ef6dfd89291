"""``Functions``: one implementation of every function, as layers are handed them.

Of functions whose protocols are in ``family_protocols.py`` only the names are known here.
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
"""Kinds of matrices, by which each is quantised: those of the layers; embedding and head; experts of a mixture; and those
too small and too delicate to be quantised, such as routers."""


@dataclass(frozen=True, kw_only=True)
class MatrixFunctions:
    """Weight packing and the kernels that read one packed layout."""

    pack_weight: PackWeight
    linear: Linear
    gated_linear: GatedLinear | None
    """None where layers call ``linear`` and an activation after each other, which comes to the same."""
    embedding: Embedding | None
    """None where tables are not held this way."""
    target: str
    """Name of ``linear`` in a ``Choice``, such as ``layer.linear``."""
    quantization: str
    pack_codes: Callable | None = None
    """None where no codes are held this way."""
    packing: str = ""
    """Name of the implementation that packs, and its layout."""


@dataclass(frozen=True, kw_only=True)
class ExpertFunctions:
    """Memory for experts and the kernel that reads its layout."""

    make_experts: Callable
    experts: Callable
    target: str
    """Name of ``experts`` in a ``Choice``."""
    quantization: str
    packing: str = ""
    """Name of the implementation that packs, and its layout."""


@dataclass(frozen=True, kw_only=True)
class Functions:
    """One implementation of every function, for one device and dtype."""

    matrices: Mapping[MatrixKind, MatrixFunctions]
    codes: Mapping[str, MatrixFunctions]
    """For matrices that a checkpoint holds in codes, by their quantization, whatever kind they are of."""
    experts: ExpertFunctions
    coded_experts: Mapping[str, ExpertFunctions]
    """For experts that a checkpoint holds in codes, by their quantization."""
    add_rms_norm: AddRMSNorm
    silu_and_mul: SiluAndMul
    gelu_and_mul: GeluAndMul
    rotate_and_write: RotateAndWrite
    paged_attention: PagedAttention
    tiled_cache: bool = False
    """Whether these two are the fastest where the KV cache is in tiles; all implementations read and write either layout."""
    argmax: Argmax
    sample: Sample
    route: Callable
    write_latent: Callable
    latent_attention: Callable
    causal_conv: Callable
    delta_rule: Callable
    gated_norm: Callable
    """This and the five before it are for layers of ``models/families``, see ``family_protocols.py``."""
