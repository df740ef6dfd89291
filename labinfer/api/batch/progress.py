"""JobProgress: progress of a job on standard error, as a live line for people or as JSON lines for programs."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TextIO

from labinfer.api.batch.time_left import TimeLeft
from labinfer.base.clock import Clock
from labinfer.base.standard_error import write_error
from labinfer.engine.llm_engine import EngineLoad
from labinfer.observe.progress_line import ProgressLine

JSONL_SECONDS = 1.0
"""Minimum seconds between two JSON lines of progress."""


class JobProgress:
    """Progress of a job, written to standard error while it runs.

    Args:
        form: value of ``--progress``.
        num_lines: number of input lines; None if unknown.
        num_done_before: lines answered by an earlier run.
    """

    def __init__(
        self,
        form: str,
        clock: Clock,
        num_lines: int | None,
        num_done_before: int,
        stream: TextIO | None = None,
    ):
        self._form, self._clock, self._num_lines, self._num_done_before = form, clock, num_lines, num_done_before
        self._stream = stream
        self._line = ProgressLine(self._stream)
        self._begin = self._last = clock()
        self._time_left = TimeLeft(clock)

    @property
    def is_for_machines(self) -> bool:
        """Whether progress is printed as JSON lines. The last JSON line has the final counts."""
        return self._form == "jsonl"

    def due(self) -> bool:
        """Whether to call ``show``: enough time has passed since its last call."""
        if self.is_for_machines:
            return self._clock() - self._last >= JSONL_SECONDS
        return self._form == "auto" and self._line.due()

    def show(
        self,
        *,
        num_done: int,
        num_failed: int,
        output_tokens: int,
        allowed_tokens: int,
        generated_tokens: int,
        load: EngineLoad,
    ) -> None:
        """Show the progress. All counts are of this run, not of earlier runs of a resumed job; ``num_done`` includes
        ``num_failed``.

        Args:
            output_tokens: output tokens of answered lines.
            allowed_tokens: sum of ``max_tokens`` of answered lines.
            generated_tokens: output tokens of answered and running lines, which grows even while no long answer finishes.
        """
        self._last = self._clock()
        seconds = max(self._last - self._begin, 1e-9)
        rate, total = generated_tokens / seconds, self._num_done_before + num_done
        seconds_left = None
        if self._num_lines is not None:
            num_left = max(0, self._num_lines - total)
            estimate = self._time_left.estimate(
                num_lines_left=num_left,
                num_answered=num_done - num_failed,
                output_tokens=output_tokens,
                allowed_tokens=allowed_tokens,
                generated_tokens=generated_tokens,
                load=load,
            )
            if num_done:  # embedding requests have no output tokens
                seconds_left = num_left / num_done * seconds if estimate is None else estimate
        if self.is_for_machines:
            record = {
                "lines_done": total,
                "lines_failed": num_failed,
                "lines": self._num_lines,
                "running": load.num_running,
                "waiting": load.num_waiting,
                "kv_cache_usage": round(load.kv_usage, 4),
                "output_tokens": output_tokens,
                "tokens_per_second": round(rate, 1),
                "seconds": round(seconds, 1),
                "seconds_left": None if seconds_left is None else round(seconds_left, 1),
            }
            write_error(json.dumps(record) + "\n", self._stream)
            return
        done = f"{total}" if self._num_lines is None else f"{total}/{self._num_lines} lines"
        left = "" if seconds_left is None else f", {timedelta(seconds=round(seconds_left))} left"
        self._line.update(
            f"{done} done{left}, {rate:.1f} tokens/s, {load.num_running} running, {load.num_waiting} waiting, "
            f"KV {100 * load.kv_usage:.0f} %"
        )

    def close(self) -> None:
        """Clear the live line on a terminal."""
        self._line.close()
