"""Batches of sequences with recurrent states, for tests of layers with a state."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.native import compiler

COUNTS, EARLIER, SLOTS = [1, 5, 130, 1, 2], [7, 0, 3, 0, 1], [3, 0, 5, 1, 4]
"""Tokens of each sequence, those before them, and slots of states."""

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so the functions are not used either"
)


def batch_of(counts: list[int], earlier: list[int], slots: list[int]) -> AttentionBatch:
    """A batch with ``counts`` new tokens of each sequence after ``earlier`` ones, and its state slots."""
    lengths = [count + before for count, before in zip(counts, earlier, strict=True)]
    batch = AttentionBatch.build([0, *accumulate(counts)], lengths, [[] for _ in counts], torch.device("cpu"))
    return replace(batch, state_slots_B=torch.tensor(slots))
