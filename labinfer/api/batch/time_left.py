"""TimeLeft: estimates the seconds until the end of a job."""

from __future__ import annotations

from labinfer.base.clock import Clock
from labinfer.engine.llm_engine import EngineLoad, RunningAnswer


class TimeLeft:
    """Estimates the time until a job ends, from its finished and running answers.

    A job does not end before its longest answer. The remaining tokens of the longest answer come at the speed of this one answer,
    whatever the throughput of the job was before.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self._begin = self._last = clock()
        self._started: dict[int, float] = {}  # ``seq_id`` → time of the last estimate before the answer began

    def estimate(
        self,
        *,
        num_lines_left: int,
        num_answered: int,
        output_tokens: int,
        allowed_tokens: int,
        generated_tokens: int,
        load: EngineLoad,
    ) -> float | None:
        """Estimate the seconds until all lines are done. None until the first token is generated.

        Args:
            num_lines_left: number of lines that are running, waiting or not read yet.
            num_answered: number of lines that were answered in this run.
            output_tokens: output tokens of answered lines.
            allowed_tokens: sum of ``max_tokens`` of answered lines.
            generated_tokens: output tokens of answered and running lines.
        """
        now = self._clock()
        self._started = {answer.seq_id: self._started.get(answer.seq_id, self._last) for answer in load.running_answers}
        self._last = now
        if not generated_tokens or now <= self._begin:
            return None
        used = min(1.0, output_tokens / allowed_tokens) if allowed_tokens else 1.0
        remaining = [_remaining_tokens(answer, used) for answer in load.running_answers]
        tokens_per_line = (generated_tokens + sum(remaining)) / max(1, num_answered + load.num_running_requests)
        tokens_left = sum(remaining) + tokens_per_line * max(0, num_lines_left - load.num_running_requests)
        seconds = tokens_left * (now - self._begin) / generated_tokens
        speed = max(  # speed of the fastest answer: others may have begun later than ``_started`` says
            (answer.num_tokens / max(now - self._started[answer.seq_id], 1e-9) for answer in load.running_answers),
            default=0.0,
        )
        return max(seconds, max(remaining) / speed) if speed else seconds


def _remaining_tokens(answer: RunningAnswer, used: float) -> float:
    """Expected number of tokens that a running answer will still generate.

    Args:
        used: fraction of ``max_tokens`` that answered lines have used, from which the length of this answer is predicted. An answer
            that is already longer than predicted is expected to double its length.
    """
    expected = used * answer.max_tokens
    if answer.num_tokens < expected:
        return expected - answer.num_tokens
    return min(answer.num_tokens, answer.max_tokens - answer.num_tokens)
