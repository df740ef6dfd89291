"""Families whose keys cannot be rotated further after they are cached refuse a context shift at the start."""

from __future__ import annotations

import pytest
from checkpoints import make_checkpoint

from labinfer import LLM
from labinfer.errors import UserError


def test_context_shift_is_refused_for_keys_that_are_normalised_after_rotation(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "hunyuan")
    with pytest.raises(UserError, match="^context_shift does not go with this model: .*keys cannot be rotated further"):
        LLM(str(directory), context_shift=True)
