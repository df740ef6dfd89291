"""Models that are served in another layout from one moment to the next: a pause, and not a token lost or doubled."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launchers import matrix
from many_streams import NUM_STREAMS, ask_all
from serving import Server, serving, wait_for

CHANGES = {
    "other layers, then one rank": (
        ("-pp", "2"),
        [({"layers": [4, 2]}, {0: (0, 4), 1: (4, 2)}), ({"layers": [6]}, {0: (0, 6)})],
    ),
    "one stage becomes two": (
        ("-tp", "2"),
        [({"tensor_parallel_size": [1, 1], "layers": [1, 5]}, {0: (0, 1), 1: (1, 5)})],
    ),
    "two stages become one": (("-pp", "2"), [({"tensor_parallel_size": [2]}, {0: (0, 6), 1: (0, 6)})]),
    "spare ranks join, in another order": (
        ("--ranks", "0"),
        [({"ranks": [1, 0], "layers": [3, 3]}, {0: (3, 3), 1: (0, 3)})],
    ),
}


@pytest.mark.parametrize(
    ("launcher", "name"),
    matrix(
        ("mpirun", "other layers, then one rank"),
        ("torchrun", "one stage becomes two"),
        over=[(name,) for name in CHANGES],
    ),
)
def test_streams_go_on_with_the_same_tokens_in_another_layout(launcher, name):
    flags, changes = CHANGES[name]
    with serving("--dtype", "float32", *flags, launcher=launcher, ranks=2) as server:
        undisturbed = ask_all(server)
        with ThreadPoolExecutor(1) as threads:
            disturbed = threads.submit(ask_all, server)
            wait_for(lambda: server.metric("vllm:num_requests_running") >= NUM_STREAMS, 20)
            for body, places in changes:
                time.sleep(0.1)
                assert not disturbed.done()
                change(server, body, places)
            assert disturbed.result(90) == undisturbed
        server.wait_idle()
        if changes[-1][0] == {"layers": [6]}:
            change(server, {"layers": [3, 3]}, {0: (0, 3), 1: (3, 3)})
            check_precision(server)
        assert server.stop() == (143 if launcher == "mpirun" else 1)  # torchrun has no other


def check_precision(server: Server) -> None:
    """The precision of one stage of two changes under load, and is refused where there is one stage only."""
    before = [rank["weight_bytes"] for rank in server.get("/v1/cluster")[1]["ranks"]]
    lengths = [120 + 20 * number for number in range(8)]
    fields = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    streams = [server.stream({"max_tokens": length} | fields) for length in lengths]
    for stream in streams:
        stream.wait_begun()
    for quantization, names in ((["none", "int8"], ("none", "int8")), (["int8", "none"], ("int8", "none"))):
        status, answer = server.post("/v1/cluster/layout", {"quantization": quantization})
        assert (status, answer["changed"], answer["quantization"]) == (200, True, ",".join(names)), answer
        for ranks in (answer["ranks"], server.get("/v1/cluster")[1]["ranks"]):
            assert tuple(rank["quantization"] for rank in ranks) == names
            for name, rank, whole in zip(names, ranks, before, strict=True):
                assert (rank["weight_bytes"] == whole) if name == "none" else (rank["weight_bytes"] < 0.5 * whole)
    status, answer = server.post("/v1/cluster/layout", {"ranks": [0]})
    assert status == 400 and "quantization int8,none has 2 values for 1 stage" in answer["error"]["message"]
    status, answer = server.post("/v1/cluster/layout", {"ranks": [0], "quantization": "none"})
    assert (status, answer["quantization"]) == (200, "none")
    for stream, length in zip(streams, lengths, strict=True):
        assert (stream.finish().error, stream.events[-1]["usage"]["completion_tokens"]) == (None, length)
    server.wait_idle()


def change(server: Server, body: dict, places: dict[int, tuple[int, int]]) -> None:
    """Have the layout changed; then these ranks have these layers, by the first and by their number."""
    begin = time.monotonic()
    status, answer = server.post("/v1/cluster/layout", body)
    print(f"{body}: {time.monotonic() - begin:.2f} s")
    assert status == 200 and answer["changed"] and 0 < answer["pause_seconds"] < 60, answer
    for ranks in (answer["ranks"], server.get("/v1/cluster")[1]["ranks"]):
        assert {rank["rank"]: (rank["first_layer"], rank["num_layers"]) for rank in ranks} == places


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_twenty_changes_leave_descriptors_threads_and_memory_as_they_were(launcher):
    def measure(pid: int) -> tuple[int, int, float]:
        status = Path(f"/proc/{pid}/status").read_text()
        megabytes = int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1e3
        return len(os.listdir(f"/proc/{pid}/fd")), int(re.search(r"Threads:\s+(\d+)", status)[1]), megabytes

    layouts = [{"layers": [4, 2]}, {"ranks": [0]}, {"tensor_parallel_size": [2]}, {"layers": [3, 3]}]
    with serving("-pp", "2", "--num-kv-blocks", "512", "--no-autotune", launcher=launcher, ranks=2) as server:
        pids, figures = [server.rank_pid(0), server.rank_pid(1), server.gateway_pid], []
        for number in range(24):
            assert server.complete().status == 200
            figures.append([*map(measure, pids), len(os.listdir("/dev/shm"))])
            print(number, *figures[-1])
            assert server.post("/v1/cluster/layout", layouts[number % 4])[0] == 200
        (*first, first_segments), (*last, last_segments) = figures[3], figures[-1]
        assert last_segments <= first_segments + 1  # others have theirs
        for (descriptors, threads, megabytes), (later, later_threads, later_megabytes) in zip(first, last, strict=True):
            assert later <= descriptors + 2 and later_threads <= threads + 1
            assert later_megabytes < megabytes + 40
