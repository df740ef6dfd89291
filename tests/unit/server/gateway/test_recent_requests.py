"""RecentRequests: the last requests of each model, in the form in which workloads are read."""

from __future__ import annotations

from labinfer.planner.workload import RequestLengths, read_workload
from labinfer.server.gateway.recent_requests import NUM_KEPT, RecentRequests, RequestSize


def size(timestamp: int, output: int = 1) -> RequestSize:
    return RequestSize(timestamp=timestamp, prompt_tokens=9, cached_tokens=4, output_tokens=output)


def test_lines_are_a_workload_in_the_order_of_arrival(tmp_path):
    recent = RecentRequests(["one", "two"])
    recent.add("one", size(1_800_000_002_500, output=3))
    recent.add("one", size(1_800_000_000_000, output=8))  # which came earlier, and took longer
    path = tmp_path / "day.jsonl"
    path.write_bytes(recent.lines("one"))
    assert read_workload(str(path)).requests == (
        RequestLengths(prompt=9, cached=4, output=8, arrival=0.0),
        RequestLengths(prompt=9, cached=4, output=3, arrival=2.5),
    )
    assert recent.lines("two") == b""


def test_oldest_requests_give_way():
    recent = RecentRequests(["one"])
    for number in range(NUM_KEPT + 10):
        recent.add("one", size(number))
    lines = recent.lines("one").splitlines()
    assert len(lines) == NUM_KEPT and lines[0].startswith(b'{"timestamp":10,')
