"""``Draw``: one random draw of a token."""

from __future__ import annotations

import msgspec

from labinfer.base.draw_params import DrawParams


class Draw(msgspec.Struct, frozen=True):
    """One random draw: the token is a pure function of the row's logits, ``position`` and ``params``."""

    row: int
    """Index of the row in the logits."""
    position: int
    """Position of the drawn token in its sequence."""
    params: DrawParams
    """Sampling parameters, with a temperature above 0."""
