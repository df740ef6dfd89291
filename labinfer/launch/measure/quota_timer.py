"""QuotaTimer: steady-state duration of work, also under a CPU quota (cgroup throttling)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from labinfer.comm.spmd.cgroup import Cgroup


@dataclass(frozen=True)
class QuotaTimer:
    """Times work under a CPU quota.

    A quota lets a process run at full speed until its quota of the period is used up, then stops it until the next period. A few
    milliseconds of work therefore take either no pause or a long one, depending on when they begin. Over many periods, work takes the CPU
    time of its threads divided by the CPUs of the quota, and at least the time in which it was not throttled.

    Args:
        cpus: CPUs that the quota grants this process; infinity without one.
    """

    cpus: float = math.inf
    cgroup: Cgroup = field(default_factory=Cgroup)

    def time(self, work: Callable[[], object]) -> float:
        """Seconds of one call of ``work`` in the long run, pauses of the quota included."""
        if math.isinf(self.cpus):
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        stopped, cpu, begin = self.cgroup.throttled_time(), time.process_time(), time.perf_counter()
        work()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        return max(cpu / self.cpus, seconds - (self.cgroup.throttled_time() - stopped))
