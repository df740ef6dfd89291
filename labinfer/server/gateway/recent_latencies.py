"""RecentLatencies: percentiles of TTFT, TPOT and queue time over the last minute, for ``/v1/cluster``.

The histograms of ``/metrics`` are too coarse for percentiles: the buckets are vLLM's, and one bucket has all TPOTs below 10 ms.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from labinfer.observe.table import percentile
from labinfer.server.gateway.cluster_answers import Percentiles

WINDOW_SECONDS = 60.0
"""Maximum age of a latency in seconds."""
MAX_SAMPLES = 1024
"""Maximum number of latencies in a window; of more, the oldest are dropped."""


class LatencyWindow:
    """Latencies of the last ``WINDOW_SECONDS``.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)  # (arrival time, latency)

    def add(self, seconds: float) -> None:
        """Add a latency of ``seconds``."""
        self._samples.append((self._clock(), seconds))

    def percentiles(self) -> Percentiles | None:
        """Percentiles of the latencies in the window, by nearest rank; None if the window is empty."""
        begin = self._clock() - WINDOW_SECONDS
        while self._samples and self._samples[0][0] < begin:
            self._samples.popleft()
        if not self._samples:
            return None
        latencies = [seconds for _, seconds in self._samples]
        return Percentiles(percentile(latencies, 0.5), percentile(latencies, 0.99))


class RecentLatencies:
    """Latency windows of each model: for TTFT, TPOT and queue time.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, model_names: Iterable[str], clock: Callable[[], float] = time.monotonic):
        names = tuple(model_names)
        self.ttft = {name: LatencyWindow(clock) for name in names}
        """Maps each model to its times to first token, recorded at the first token."""
        self.time_per_output_token = {name: LatencyWindow(clock) for name in names}
        """Maps each model to the mean inter-token latencies of its answers, recorded at the end of an answer."""
        self.queue_time = {name: LatencyWindow(clock) for name in names}
        """Maps each model to times in the engine's waiting queue, recorded at the first token."""
