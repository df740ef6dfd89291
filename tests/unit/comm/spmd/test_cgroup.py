"""Quotas and limits are read from made-up folders of cgroup v1 and v2, as kernels, containers and batch systems lay them out."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labinfer.comm.spmd.cgroup import Cgroup

GIB = 1 << 30


def make(tmp_path: Path, cgroup: str, mounts: dict[str, str], files: dict[str, str]) -> Cgroup:
    """A process with these groups.

    Args:
        cgroup: lines of ``/proc/self/cgroup``.
        mounts: type and controllers of each mount point, behind the root that is mounted there.
        files: texts by path from ``tmp_path``.
    """
    process = tmp_path / "process"
    process.mkdir()
    (process / "cgroup").write_text(cgroup)
    lines = ["22 1 254:0 / / rw,relatime - ext4 /dev/vda rw"]
    for number, (point, text) in enumerate(mounts.items()):
        root, kind, options = text.split()
        lines.append(
            f"{30 + number} 22 0:{number} {root} {tmp_path / point} rw,nosuid shared:9 - {kind} cgroup {options}"
        )
    (process / "mountinfo").write_text("\n".join(lines) + "\n")
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return Cgroup(process)


def test_mounts_of_other_kinds_may_be_odd(tmp_path):
    group = make(tmp_path, "0::/job\n", {"cg": "/ cgroup2 rw"}, {"cg/job/cpu.max": "50000 100000"})
    lines = [b"40 22 0:40 / /mnt rw - tmpfs  rw", b"41 22 0:41 / /mnt/\xff rw - 9p C: rw,path=C:\\Program Files,x"]
    (tmp_path / "process" / "mountinfo").write_bytes(
        b"\n".join([*lines, (tmp_path / "process" / "mountinfo").read_bytes()])
    )
    assert group.cpu_quota() == 0.5


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("50000 100000", 0.5),
        ("150000 100000\n", 1.5),
        ("1000 4000", 0.25),
        ("max 100000", math.inf),
        ("", math.inf),
        ("odd", math.inf),
    ],
)
def test_quota_of_version_2_keeps_fractions(tmp_path, text, quota):
    group = make(tmp_path, "0::/job\n", {"cg": "/ cgroup2 rw"}, {"cg/job/cpu.max": text})
    assert group.cpu_quota() == quota


@pytest.mark.parametrize(("quota", "period", "cpus"), [(2000, 4000, 0.5), (300000, 100000, 3), (-1, 100000, math.inf)])
def test_quota_of_version_1_keeps_fractions(tmp_path, quota, period, cpus):
    files = {"cpu/job/cpu.cfs_quota_us": f"{quota}\n", "cpu/job/cpu.cfs_period_us": f"{period}\n"}
    mounts = {"memory": "/ cgroup rw,memory", "cpu": "/ cgroup rw,cpuacct,cpu"}
    assert make(tmp_path, "5:cpuacct,cpu:/job\n4:memory:/\n0::/\n", mounts, files).cpu_quota() == cpus


def test_quota_of_a_group_around_counts_where_it_is_less(tmp_path):
    files = {
        "cg/slice/cpu.max": "75000 100000",
        "cg/slice/job/step/cpu.max": "max 100000",
        "cg/slice/job/cpu.max": "2 1",
    }
    assert make(tmp_path, "0::/slice/job/step\n", {"cg": "/ cgroup2 rw"}, files).cpu_quota() == 0.75


def test_both_versions_at_once_give_the_lesser_quota(tmp_path):
    mounts = {"unified": "/ cgroup2 rw", "cpu": "/ cgroup rw,cpu"}
    files = {"cpu/cpu.cfs_quota_us": "1000", "cpu/cpu.cfs_period_us": "2000", "unified/a/cpu.max": "4 1"}
    assert make(tmp_path, "1:cpu:/\n0::/a\n", mounts, files).cpu_quota() == 0.5


def test_container_that_sees_its_own_group_as_the_root_finds_its_quota(tmp_path):
    """As with cgroup v1 and no namespace for groups: the path is the host's, the mount shows the container's part."""
    mounts = {"cpu": "/docker/5f1 cgroup rw,cpu"}
    files = {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}
    assert make(tmp_path, "3:cpu:/docker/5f1\n", mounts, files).cpu_quota() == 2.5
    (tmp_path / "process/cgroup").write_text("3:cpu:/elsewhere\n")
    assert Cgroup(tmp_path / "process").cpu_quota() == 2.5


def test_machine_without_control_groups_has_no_limits(tmp_path):
    group = Cgroup(tmp_path / "nowhere")
    assert group.cpu_quota() == group.memory_limit() == group.memory_left() == math.inf


@pytest.mark.parametrize(
    ("mount", "line", "names"),
    [
        ("cgroup2 rw", "0::", ("memory.max", "memory.current", "inactive_file")),
        ("cgroup rw,memory", "4:memory:", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_memory_is_what_is_left_with_pages_that_can_be_dropped(tmp_path, mount, line, names):
    limit, usage, droppable = names
    files = {
        f"m/job/{limit}": f"{8 * GIB}",
        f"m/job/{usage}": f"{5 * GIB}",
        "m/job/memory.stat": f"anon 7\n{droppable} {GIB}\n",
    }
    group = make(tmp_path, f"{line}/job\n", {"m": f"/ {mount}"}, files)
    assert group.memory_limit() == 8 * GIB and group.memory_left() == 4 * GIB
    (tmp_path / "m/job" / limit).write_text("max\n" if limit == "memory.max" else "9223372036854771712\n")
    assert group.memory_limit() > 2**60 and group.memory_left() > 2**60


@pytest.mark.parametrize("outer", ["max\n", f"{8 * GIB}\n"])
def test_memory_group_is_that_of_the_least_limit(tmp_path, outer):
    names = ("m/memory.max", "m/job/memory.max", "m/job/a/memory.max", "m/job/b/memory.max")
    limits = dict(zip(names, ("max\n", outer, f"{GIB}\n", f"{GIB}\n"), strict=True))
    first = make(tmp_path, "0::/job/a\n", {"m": "/ cgroup2 rw"}, limits)

    def groups() -> list[int]:
        numbers = [first.memory_group()]
        (tmp_path / "process/cgroup").write_text("0::/job/b\n")
        numbers.append(first.memory_group())
        (tmp_path / "process/cgroup").write_text("0::/job/a\n")
        return numbers

    a, b = groups()
    assert 0 not in (a, b) and a != b
    for name in names[2:]:
        (tmp_path / name).write_text(outer)
    a, b = groups()
    assert a == b and bool(a) == (outer != "max\n")


V1_CPU = Path("/sys/fs/cgroup/cpu")


@pytest.mark.skipif(
    not os.access(V1_CPU / "cpu.cfs_quota_us", os.W_OK) and not os.access(V1_CPU / "cgroup.procs", os.W_OK),
    reason="needs root and a cgroup v1 file system of the cpu controller that can be written",
)
def test_process_in_a_real_group_of_version_1_sees_its_quota():
    group = V1_CPU / f"labinfer-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("4000")
        (group / "cpu.cfs_quota_us").write_text("1000")
        code = "from labinfer.comm.spmd.cgroup import Cgroup; print(Cgroup().cpu_quota())"
        enter = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c '{code}'"
        done = subprocess.run(["sh", "-c", enter], capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    assert float(done.stdout) == 0.25


@pytest.mark.parametrize(
    ("mount", "line", "text"),
    [
        ("cgroup2 rw", "0::", "usage_usec 7\nnr_throttled 3\nthrottled_usec 1500000\n"),
        ("cgroup rw,cpu", "1:cpu:", "nr_periods 9\nnr_throttled 3\nthrottled_time 1500000000\n"),
    ],
)
def test_stopped_time_is_read_of_both_versions(tmp_path, mount, line, text):
    group = make(tmp_path, f"{line}/job\n", {"cg": f"/ {mount}"}, {"cg/job/cpu.stat": text})
    assert group.throttled_time() == 1.5


def test_stopped_time_is_none_where_nothing_counts_it(tmp_path):
    assert make(tmp_path, "0::/job\n", {"cg": "/ cgroup2 rw"}, {"cg/job/cpu.stat": "odd\n"}).throttled_time() == 0.0
