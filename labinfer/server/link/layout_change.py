"""LayoutChange: a request to serve a model in another layout."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from labinfer.planner.saved_plan import MAX_STAGES, SavedPlan

Counts = Annotated[
    list[Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]], msgspec.Meta(min_length=1, max_length=MAX_STAGES)
]

Quantization = Literal["auto", "none", "int8", "int4"]


class LayoutChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of ``POST /v1/cluster/layout``; each field has the meaning of the flag with its name.

    ``tensor_parallel_size``, ``layers`` and ``ranks`` together describe the stages: if at least one of them is given, those that
    are omitted have the defaults of their flags. Every other field that is omitted keeps its current value.
    """

    model: str | None = None
    """Served name of the model; None for the default model."""
    tensor_parallel_size: Counts | None = None
    layers: Counts | None = None
    ranks: (
        Annotated[
            list[Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]], msgspec.Meta(min_length=1, max_length=MAX_STAGES)
        ]
        | None
    ) = None
    dtype: (
        Annotated[
            list[Literal["auto", "float32", "bfloat16", "float16"]], msgspec.Meta(min_length=1, max_length=MAX_STAGES)
        ]
        | None
    ) = None
    quantization: (
        Quantization | Annotated[list[Quantization], msgspec.Meta(min_length=1, max_length=MAX_STAGES)] | None
    ) = None
    """Quantization of the weights: one name for all stages, or one per stage."""
    plan: SavedPlan | None = None
    """A layout as written by ``launch.py plan --auto --save``; replaces all other fields except ``model``."""

    @property
    def moves(self) -> bool:
        """Whether the change has a field that assigns layers to ranks, not only dtype or quantization."""
        return any(field is not None for field in (self.tensor_parallel_size, self.layers, self.ranks))
