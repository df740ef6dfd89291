"""Work under a CPU quota takes its CPU time over the quota, however short it is; other work takes the time that passes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from labinfer.launch.measure.quota_timer import QuotaTimer


@dataclass
class StoppingGroup:
    """A group that has been stopped for so long at each look."""

    times: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def throttled_time(self) -> float:
        return self.times.pop(0)


def work(seconds: float) -> None:
    """Use so much CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.timing
def test_burst_counts_as_the_quota_would_have_it_go_on():
    assert QuotaTimer(0.25, StoppingGroup()).time(lambda: work(0.01)) == pytest.approx(0.04, rel=0.1)


@pytest.mark.timing
def test_pause_that_the_quota_has_made_does_not_count_twice():
    def stopped_work() -> None:
        work(0.01)
        time.sleep(0.2)

    assert QuotaTimer(0.25, StoppingGroup([1.0, 1.2])).time(stopped_work) == pytest.approx(0.04, rel=0.2)


def test_wait_takes_the_time_that_passes():
    assert QuotaTimer(0.5, StoppingGroup()).time(lambda: time.sleep(0.03)) >= 0.03
    assert QuotaTimer().time(lambda: time.sleep(0.03)) >= 0.03


V1_CPU = Path("/sys/fs/cgroup/cpu")
CODE = """
import time
from labinfer.launch.measure.quota_timer import QuotaTimer
from labinfer.comm.spmd.cgroup import Cgroup
def work():
    end = time.process_time() + 0.003
    while time.process_time() < end:
        pass
cgroup = Cgroup()
watch = QuotaTimer(cgroup.cpu_quota(), cgroup)
print(*(watch.time(work) for _ in range(40)))
"""


@pytest.mark.timing
@pytest.mark.skipif(
    not os.access(V1_CPU / "cpu.cfs_quota_us", os.W_OK) and not os.access(V1_CPU / "cgroup.procs", os.W_OK),
    reason="needs root and a cgroup v1 file system of the cpu controller that can be written",
)
@pytest.mark.parametrize("period", [4_000, 100_000])
def test_short_steps_in_a_real_group_are_alike_whatever_its_period(period):
    group = V1_CPU / f"labinfer-quota-timer-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(period))
        (group / "cpu.cfs_quota_us").write_text(str(period // 4))
        enter = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c '{CODE}'"
        done = subprocess.run(["sh", "-c", enter], capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    seconds = sorted(map(float, done.stdout.split()))
    assert math.isclose(seconds[len(seconds) // 4], 0.012, rel_tol=0.1)
    assert math.isclose(seconds[len(seconds) // 2], 0.012, rel_tol=0.15)
