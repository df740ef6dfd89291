"""Helpers of benchmarks that compare several engines in one launch: an LLM for each, and medians over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.comm.group.failure import end_group_on_uncaught
from labinfer.comm.group.rank_group import join_group
from labinfer.comm.spmd.environment import detect


@contextmanager
def launched(variants: dict[str, dict[str, Any]], plugins: Sequence[str] = ()) -> Iterator[dict[str, LLM]]:
    """Join the group under any launcher, and load an LLM for each variant; the ranks leave together.

    Args:
        variants: keyword arguments of ``LLM``, by the variant's name. Stages are as many as the ranks allow.
        plugins: values of ``--plugin``, loaded before the variants' options are checked.
    """
    group = join_group(detect(), EngineOptions.group_options(next(iter(variants.values()))))
    end_group_on_uncaught(group)
    group.load_plugins(plugins)
    checked = {name: EngineOptions.from_flat(flat) for name, flat in variants.items()}
    yield {name: LLM.from_options(group, options) for name, options in checked.items()}
    group.close()  # not after a failure: the others would not meet this collective


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Median of each figure over the rounds."""
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}
