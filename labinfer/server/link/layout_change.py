"""LayoutChange: a layout that is asked for while a model is served."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from labinfer.planner.saved_plan import MAX_STAGES, SavedPlan

Counts = Annotated[
    list[Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]], msgspec.Meta(min_length=1, max_length=MAX_STAGES)
]

Quantization = Literal["auto", "none", "int8", "int4"]


class LayoutChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of ``POST /v1/cluster/layout``: fields with the meanings of the flags of these names.

    The first three together describe the stages as flags do at a start: where one of them is given, those that are not have
    their defaults. All else that is left out stays as it is.
    """

    model: str | None = None
    """None for the first one."""
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
    """One for all stages, or a list as that of dtype."""
    plan: SavedPlan | None = None
    """A layout as ``launch.py plan --auto --save`` writes it, in place of all other fields but the model."""

    @property
    def moves(self) -> bool:
        """Whether the stages change, not only dtype or quantization."""
        return any(field is not None for field in (self.tensor_parallel_size, self.layers, self.ranks))
