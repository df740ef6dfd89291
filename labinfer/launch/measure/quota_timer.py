"""QuotaTimer: steady-state duration of work, also under a CPU quota (cgroup throttling)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from labinfer.comm.spmd.cgroup import Cgroup


@dataclass(frozen=True)
class QuotaTimer:
    """Times work.

    A quota lets a process run at full speed until its part of a period is used up, and stops it until the next one, at ticks of the
    kernel and with the excess to be paid for. So a few milliseconds of work take the time of a whole CPU or that of a long pause, by
    when they begin. Where work goes on for many periods it takes the CPU time of its threads over the CPUs that the quota grants, and no
    less than the time in which it was not stopped.

    Args:
        cpus: CPUs' worth of time that a quota grants this process; infinity without one.
    """

    cpus: float = math.inf
    cgroup: Cgroup = field(default_factory=Cgroup)

    def time(self, work: Callable[[], object]) -> float:
        """Seconds of one call."""
        if math.isinf(self.cpus):
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        stopped, cpu, begin = self.cgroup.throttled_time(), time.process_time(), time.perf_counter()
        work()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        return max(cpu / self.cpus, seconds - (self.cgroup.throttled_time() - stopped))
