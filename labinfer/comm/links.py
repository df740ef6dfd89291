"""Link measurements between hosts: latency and bandwidth of all pairs, and bandwidth of neighbours that send at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labinfer.comm.communicator import Communicator

SMALL_BYTES, LARGE_BYTES = 64, 1 << 20
PAIR_SECONDS = 0.1
"""Approximate seconds for which messages of one size are timed between two hosts."""
MIN_ROUNDS, MAX_ROUNDS = 3, 50


@dataclass(frozen=True)
class LinkTimes:
    """Latency and bandwidth of a link, as the mean of both directions."""

    latency: float
    """Seconds until a small message arrives at the other host."""
    bytes_per_second: float
    """Bandwidth of a large message, without latency."""


def pair_rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` hosts in the fewest rounds of disjoint pairs (as in a round-robin tournament)."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        players[1:] = [players[-1], *players[1:-1]]
    return rounds


def measure_links(comm: Communicator, hosts: Sequence[int]) -> dict[tuple[int, int], LinkTimes]:
    """Measure the links between all pairs of ``hosts``, keyed by ascending indices. Collective; every rank gets equal results.

    Args:
        hosts: the measuring rank of each host.
    """
    index = hosts.index(comm.rank) if comm.rank in hosts else None
    mine: dict[tuple[int, int], LinkTimes] = {}
    for pairs in pair_rounds(len(hosts)):
        comm.barrier()
        for pair in pairs:
            if index in pair:
                peer = hosts[pair[1] if index == pair[0] else pair[0]]
                times = _measure_pair(comm, peer, leads=index == pair[0])
                if index == pair[0]:
                    mine[pair] = times
    return _share(comm, hosts, mine)


def measure_neighbours(comm: Communicator, hosts: Sequence[int]) -> dict[tuple[int, int], float]:
    """Bandwidth from each host to the next while all send at once: lower than for a host alone if hosts share a switch or a network card.

    Collective; every rank gets equal results, keyed by indices of ``hosts``.

    Args:
        hosts: the measuring rank of each host, in the order of the stages.
    """
    index = hosts.index(comm.rank) if comm.rank in hosts else None
    times: list[float] = []
    for _ in range(1 + MIN_ROUNDS):  # the first repetition opens connections
        comm.barrier()
        if index is not None:
            times.append(_pass_on(comm, hosts, index))
    mine: dict[tuple[int, int], LinkTimes] = {}
    if index:
        mine[index - 1, index] = LinkTimes(0.0, LARGE_BYTES / statistics.median(times[1:]))
    return {pair: times.bytes_per_second for pair, times in _share(comm, hosts, mine).items()}


def _pass_on(comm: Communicator, hosts: Sequence[int], index: int) -> float:
    """Send a large message to the next host and receive the previous host's message. Returns the seconds until the latter arrives."""
    arrival, begin = torch.empty(LARGE_BYTES, dtype=torch.uint8), time.perf_counter()
    incoming = comm.irecv(arrival, hosts[index - 1]) if index > 0 else None
    leaving = comm.isend(torch.zeros_like(arrival), hosts[index + 1]) if index + 1 < len(hosts) else None
    if incoming is not None:
        incoming.wait(f"{LARGE_BYTES} bytes from rank {hosts[index - 1]}")
    seconds = time.perf_counter() - begin
    if leaving is not None:
        leaving.wait(f"rank {hosts[index + 1]} to receive {LARGE_BYTES} bytes")
    return seconds


def _measure_pair(comm: Communicator, peer: int, leads: bool) -> LinkTimes:
    """One-way times of a small and a large message: half the median round trip."""
    small, large = (_time_pair(comm, peer, size, leads=leads) for size in (SMALL_BYTES, LARGE_BYTES))
    return LinkTimes(small, (LARGE_BYTES - SMALL_BYTES) / max(1e-9, large - small))


def _time_pair(comm: Communicator, peer: int, size: int, *, leads: bool) -> float:
    """One-way seconds of a message of ``size`` bytes. The leading rank chooses the number of repetitions."""

    def there_and_back(size: int) -> None:
        data = torch.zeros(size, dtype=torch.uint8)
        if leads:
            comm.isend(data, peer).wait(f"rank {peer} to receive {size} bytes")
            comm.irecv(data, peer).wait(f"{size} bytes from rank {peer}")
        else:
            comm.irecv(data, peer).wait(f"{size} bytes from rank {peer}")
            comm.isend(data, peer).wait(f"rank {peer} to receive {size} bytes")

    there_and_back(size)
    begin = time.perf_counter()
    there_and_back(size)
    seconds = time.perf_counter() - begin
    count = torch.tensor([min(MAX_ROUNDS, max(MIN_ROUNDS, round(PAIR_SECONDS / seconds)))])
    if leads:
        comm.isend(count, peer).wait(f"rank {peer} to receive the number of rounds")
    else:
        comm.irecv(count, peer).wait(f"the number of rounds from rank {peer}")
    times = []
    for _ in range(int(count)):
        begin = time.perf_counter()
        there_and_back(size)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / 2


def _share(
    comm: Communicator, hosts: Sequence[int], mine: dict[tuple[int, int], LinkTimes]
) -> dict[tuple[int, int], LinkTimes]:
    """Gather the times that each rank has measured. Returns all of them, on every rank."""
    count = len(hosts)
    table = torch.zeros(count, count, 2, dtype=torch.float64)
    for (a, b), times in mine.items():
        table[a, b] = torch.tensor([times.latency, times.bytes_per_second])
    total = sum(comm.all_gather(table), torch.zeros_like(table))
    return {
        (a, b): LinkTimes(*total[a, b].tolist()) for a in range(count) for b in range(a + 1, count) if total[a, b, 1]
    }
