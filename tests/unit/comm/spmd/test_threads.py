"""How many threads a rank runs, and which cores are its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from labinfer.comm.spmd.machine import RankInfo, last_level_caches, numa_node, usable_cores
from labinfer.comm.spmd.threads import (
    ThreadChoice,
    advice_on_memory,
    choose_threads,
    format_ranges,
    is_oversubscribed,
    own_cores,
)


def rank(number: int, cores: list[list[int]], node: str = "a", num_cpus: int = 8, limit: float = 8) -> RankInfo:
    return RankInfo(
        rank=number,
        local_rank=number,
        node=node,
        cores=cores,
        num_cpus=num_cpus,
        cpu_limit=limit,
        accelerator="",
        num_accelerators=0,
        torch_version="2",
    )


def ranks(count: int, cores: list[list[int]], **given) -> list[RankInfo]:
    return [rank(number, cores, **given) for number in range(count)]


def choose(everyone: list[RankInfo], number: int = 0, wanted: int = 0, omp: int = 0, forced: bool = False):
    return choose_threads(everyone[number], everyone, wanted, omp, forced)


def singles(*cpus: int) -> list[list[int]]:
    return [[cpu] for cpu in cpus]


EIGHT = singles(*range(8))


@pytest.mark.parametrize("count", range(1, 9))
def test_cores_of_a_node_are_dealt_whole_and_once(count):
    everyone = ranks(count, EIGHT)
    dealt = [own_cores(info, everyone) for info in everyone]
    assert sum(dealt, []) == EIGHT
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_every_rank_has_a_thread_for_each_of_its_own_cores_and_stays_on_them():
    everyone = ranks(3, EIGHT)
    assert [choose(everyone, number).count for number in range(3)] == [3, 3, 2]
    assert [choose(everyone, number).bound_to for number in range(3)] == [(0, 1, 2), (3, 4, 5), (6, 7)]


def test_hardware_threads_of_a_core_go_to_the_same_rank_and_count_once():
    everyone = ranks(2, [[0, 4], [1, 5], [2, 6], [3, 7]])
    assert choose(everyone, 1) == ThreadChoice(2, "4 cores shared by 2 ranks", (2, 6, 3, 7))


def test_rank_alone_keeps_its_mask():
    assert choose(ranks(1, EIGHT)) == ThreadChoice(8, "8 cores")


def test_ranks_that_a_launcher_has_bound_keep_their_masks():
    everyone = [rank(0, singles(0, 1)), rank(1, singles(2, 3))]
    assert choose(everyone, 1) == ThreadChoice(2, "2 cores; CPU affinity: 2 of the node's 8 CPUs")


def test_mask_that_several_ranks_were_given_is_dealt_among_them():
    everyone = ranks(2, singles(4, 5, 6, 7)) + [rank(2, singles(0, 1))]
    assert [choose(everyone, number).bound_to for number in range(3)] == [(4, 5), (6, 7), ()]


def test_masks_that_overlap_without_being_the_same_are_left_alone():
    everyone = [rank(0, singles(0, 1, 2, 3)), rank(1, singles(2, 3))]
    assert [(choose(everyone, number).count, choose(everyone, number).bound_to) for number in range(2)] == [
        (2, ()),
        (1, ()),
    ]


def test_more_ranks_than_cores_run_one_thread_each_wherever_there_is_room():
    everyone = ranks(9, EIGHT)
    assert {(choose(everyone, number).count, choose(everyone, number).bound_to) for number in range(9)} == {(1, ())}
    assert is_oversubscribed(everyone, "a")
    assert not is_oversubscribed(everyone[:8], "a")


def test_other_nodes_have_cores_of_their_own():
    everyone = [rank(0, EIGHT, "a"), rank(1, EIGHT, "b")]
    assert choose(everyone, 1) == ThreadChoice(8, "8 cores")


def test_containers_limit_counts_where_it_is_less_than_the_cores():
    everyone = ranks(2, EIGHT, limit=4)
    assert [choose(everyone, number).count for number in range(2)] == [2, 2]
    assert choose(everyone, 1).bound_to == (4, 5, 6, 7)
    assert choose(ranks(4, EIGHT, limit=2)).count == 1


@pytest.mark.parametrize(
    ("limit", "threads", "reason"),
    [
        (0.5, 1, "0.5 CPU of 8 cores (CPU quota of the container)"),
        (2.5, 2, "2.5 CPUs of 8 cores (CPU quota of the container)"),
        (7.96, 7, "7.96 CPUs of 8 cores (CPU quota of the container)"),
        (8, 8, "8 cores"),
    ],
)
def test_quota_with_a_fraction_gives_whole_threads_and_is_told(limit, threads, reason):
    assert choose(ranks(1, EIGHT, limit=limit)) == ThreadChoice(threads, reason)


def test_ranks_under_a_quota_of_half_a_core_do_not_spin_while_they_wait():
    assert is_oversubscribed(ranks(1, EIGHT, limit=0.5), "a")
    assert not is_oversubscribed(ranks(1, EIGHT, limit=1), "a")
    everyone = ranks(2, EIGHT, limit=0.5)
    assert [choose(everyone, number).count for number in range(2)] == [1, 1]
    assert "shared by 2 ranks" in choose(everyone).reason


@pytest.mark.parametrize(("wanted", "omp", "reason"), [(2, 7, "--threads"), (0, 2, "OMP_NUM_THREADS=2")])
def test_what_the_user_asks_for_is_done_and_bound_where_it_fits(wanted, omp, reason):
    assert choose(ranks(2, EIGHT), 1, wanted, omp) == ThreadChoice(2, reason, (4, 5, 6, 7))


def test_more_threads_than_own_cores_are_not_squeezed_onto_them():
    assert choose(ranks(2, EIGHT), wanted=5) == ThreadChoice(5, "--threads")


def test_ranks_with_unequal_shares_are_bound_all_or_none():
    everyone = ranks(2, singles(0, 1, 2))
    assert [choose(everyone, number).bound_to for number in range(2)] == [(0, 1), (2,)]
    assert [choose(everyone, number, wanted=2).bound_to for number in range(2)] == [(), ()]
    assert [choose(everyone, number, wanted=1).bound_to for number in range(2)] == [(0, 1), (2,)]


def test_thread_that_torchrun_forces_is_named_where_it_is_not_followed():
    assert "OMP_NUM_THREADS=1 set by torchrun is ignored" in choose(ranks(2, EIGHT), forced=True).reason
    assert "torchrun" not in choose(ranks(8, EIGHT), forced=True).reason


def test_cores_are_read_with_their_hardware_threads_socket_by_socket(tmp_path):
    """Two sockets of two cores of two threads, numbered as Linux does: first threads of all cores, then second ones."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n")
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert usable_cores(range(8), tmp_path) == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert usable_cores([3, 4, 5, 6], tmp_path) == [[4], [6], [5], [3]]


def test_cores_of_a_numa_node_are_neighbours(tmp_path):
    """A socket with two nodes, whose cores are numbered in turn."""
    for cpu in range(4):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "thread_siblings_list").write_text(f"{cpu}\n")
        (tmp_path / f"cpu{cpu}" / f"node{cpu % 2}").mkdir()
    assert usable_cores(range(4), tmp_path) == [[0], [2], [1], [3]]
    assert [numa_node(cpu, tmp_path) for cpu in range(5)] == [0, 1, 0, 1, 0]


def test_a_rank_on_several_numa_nodes_is_advised_against():
    assert advice_on_memory([1, 1], 4) == ""
    assert "spans 2 NUMA nodes" in advice_on_memory([0, 1, 0], 1) and "-tp 2" in advice_on_memory([0, 1], 1)


def test_last_level_caches_that_cpus_share_count_once(tmp_path):
    """Four CPUs with a second level each and a third level for two."""
    for cpu in range(4):
        for index, size, sharing in ((2, "512K", f"{cpu}"), (3, "32768K", f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}")):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{sharing}\n")
    assert last_level_caches(tmp_path) == 64 << 20


def test_machine_that_says_nothing_of_its_cores_has_one_for_each_cpu(tmp_path):
    assert usable_cores([5, 2], tmp_path) == [[2], [5]]
    assert last_level_caches(tmp_path) == 0


@pytest.mark.parametrize(("cpus", "text"), [([], ""), ([3], "3"), ([2, 0, 1, 5], "0-2,5"), ([0, 2, 4], "0,2,4")])
def test_cpus_are_written_as_taskset_does(cpus, text):
    assert format_ranges(cpus) == text


def test_binding_holds_for_threads_that_run_already_and_for_new_ones():
    code = """
import os, sys, threading
from labinfer.comm.spmd.threads import bind

event = threading.Event()
before = threading.Thread(target=event.wait)
before.start()
bind([int(sys.argv[1])])
after = threading.Thread(target=event.wait)
after.start()
print(sorted(os.sched_getaffinity(thread.native_id) == {int(sys.argv[1])} for thread in (before, after)))
event.set()
"""
    cpu = max(os.sched_getaffinity(0))
    done = subprocess.run([sys.executable, "-c", code, str(cpu)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[True, True]"
