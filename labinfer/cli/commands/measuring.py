"""measuring: shows a progress line on rank 0 while the machines are probed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from labinfer.comm.group.rank_group import RankGroup
from labinfer.observe.progress_line import START_SECONDS, Ticker


@contextlib.contextmanager
def measuring(group: RankGroup) -> Iterator[Callable[[str], None]]:
    """Context that shows a progress line while the machines are probed; yields a function that sets the text of the line."""
    tickers: list[Ticker] = []

    def on_progress(text: str) -> None:
        if group.rank == 0 and not tickers:
            tickers.append(Ticker(lambda: "measuring", plain_seconds=START_SECONDS))
        for ticker in tickers:
            ticker.describe = lambda: f"measuring: {text}"

    try:
        yield on_progress
    finally:
        for ticker in tickers:
            ticker.close()
