"""Hosts that are network namespaces with CPU quotas (cgroup v1) on this machine, and mpirun over them (Linux, root)."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from namespace_cables import address, enter_network, join_hosts

PERIOD_US, LEAST_QUOTA_US = 5000, 1000
"""The latter is the kernel's: a host with less of a period has a longer one. The former is no multiple of a kernel's tick (4 ms is usual), at
which groups take turns on a core: of two with periods as long as ticks one may find its turns taken always."""
SHARES = 1 << 18
"""Weight of a host beside whatever else runs on this machine, the most there is: it gets its quota."""
CGROUP, MEMORY_CGROUP = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/memory")
TRANSPORTS = {"UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"}
"""Environment of MPI: memory is not shared, though it could be here."""
RSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
number=$((${1##*.} - 1)); shift
for group in GROUPS; do echo $$ > $group$number/cgroup.procs; done
exec nsenter --net=/run/netns/NAME$number unshare --uts --mount sh -c \\
  "mount --bind DIRECTORY/hosts /etc/hosts; mount --rbind /sys/fs/cgroup DIRECTORY/cgroup; mount -t sysfs none /sys
   mount --rbind DIRECTORY/cgroup /sys/fs/cgroup; hostname host-$number; exec taskset -c $(echo CORES | cut -d , -f $((number + 1))) $*"
"""
"""Like ssh, to these hosts. A system of files under /sys that is mounted anew has a host's devices, but no control groups."""


IDLER = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[2])})
open(f"{sys.argv[1]}/cgroup.procs", "w").write(str(os.getpid()))
while True:
    pass
"""
"""Uses up the quota of a host whose rank waits, on the host's core, and gives way at once when it does not: a rank that has rested may run for more than
its share, which no slow machine does."""


@contextmanager
def hosts(
    directory: Path, quotas: Sequence[float], *, delays: Sequence[float], mbit: float, memories: Sequence[float] = ()
) -> Iterator[list[str]]:
    """The hosts, and the beginning of a command that starts a rank on each. SIGTERM ends this process in order from here on.

    Args:
        directory: for files that the hosts need; empty.
        quotas: CPUs of each.
        delays: seconds between each host and the middle of the network.
        mbit: rate of each host's device.
        memories: GiB of each; empty for no limit.
    """
    # So that SIGTERM leaves the context, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    name, groups, idlers, cores = _prefix(), [], [], _share_cores(quotas)
    (directory / "hosts").write_text("127.0.0.1 localhost\n")
    (directory / "cgroup").mkdir()
    rsh = directory / "rsh"
    in_groups = " ".join(f"{root}/{name}" for root in (CGROUP, *[MEMORY_CGROUP] * bool(memories)))
    words = {"DIRECTORY": str(directory), "NAME": name, "GROUPS": in_groups, "CORES": ",".join(map(str, cores))}
    rsh.write_text(functools.reduce(lambda text, word: text.replace(*word), words.items(), RSH))
    rsh.chmod(0o755)
    try:
        for number, quota in enumerate(quotas):
            (group := CGROUP / f"{name}{number}").mkdir()
            groups.append(group)
            period = max(PERIOD_US, round(LEAST_QUOTA_US / quota))
            (group / "cpu.cfs_period_us").write_text(str(period))
            _set_quota(group, round(period * quota))
            (group / "cpu.shares").write_text(str(SHARES))
            if quota < 1:
                idlers.append(subprocess.Popen([sys.executable, "-c", IDLER, str(group), str(cores[number])]))
        for number, gib in enumerate(memories):
            (group := MEMORY_CGROUP / f"{name}{number}").mkdir()
            groups.append(group)
            (group / "memory.limit_in_bytes").write_text(str(round(gib * 2**30)))
        with join_hosts(name, delays, mbit=mbit):
            mpirun = str(Path(sys.executable).parent / "mpirun")
            reach = ["-launcher", "ssh", "-launcher-exec", str(rsh), "-localhost", address(0)]
            where = ["-hosts", ",".join(map(address, range(len(quotas)))), "-ppn", "1", "-n", str(len(quotas))]
            yield [str(rsh), address(0), mpirun, *reach, *where]
    finally:
        for idler in idlers:
            idler.kill()
            idler.wait()
        for group in groups:
            while pids := (group / "cgroup.procs").read_text().split():  # one with a small quota is slow to die
                for pid in pids:
                    os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.2)
            group.rmdir()


def enter_host(number: int) -> None:
    """Be on the network of a host, with all of this machine's cores: this thread, and what it starts."""
    enter_network(f"{_prefix()}{number}")


@contextmanager
def slowed(number: int, fraction: float) -> Iterator[None]:
    """Leave a host this part of its CPU quota."""
    group = CGROUP / f"{_prefix()}{number}"
    before = int((group / "cpu.cfs_quota_us").read_text())
    _set_quota(group, round(before * fraction))
    try:
        yield
    finally:
        _set_quota(group, before)


def _set_quota(group: Path, quota_us: int) -> None:
    """Give a host so much of each period (Linux 5.14 or later).

    What it could not use of one, since another host had the core, it may use in the next one: without that, hosts of one core have up to a
    tenth less than their quotas.
    """
    (group / "cpu.cfs_burst_us").write_text("0")  # it must never be more than the quota
    (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    (group / "cpu.cfs_burst_us").write_text(str(quota_us))


def _share_cores(quotas: Sequence[float]) -> list[int]:
    """A core for each host, in turn that of two which has less to do: quotas of 1, 0.5 and 0.25 leave the first one a core of its own."""
    used, cores = [0.0, 0.0], []
    for quota in quotas:
        cores.append(core := used.index(min(used)))
        used[core] += quota
    return cores


def _prefix() -> str:
    """Beginning of the names of this process's hosts."""
    return f"bench{os.getpid()}-"
