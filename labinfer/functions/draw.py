"""Draw: the random choice of one token."""

from __future__ import annotations

import msgspec

from labinfer.base.draw_params import DrawParams


class Draw(msgspec.Struct, frozen=True):
    """The token is a pure function of the row's logits, the position and the parameters."""

    row: int
    """Row of the logits."""
    position: int
    """Position of the drawn token in its sequence."""
    params: DrawParams
    """With a temperature above 0."""
