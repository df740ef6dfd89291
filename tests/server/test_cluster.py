"""/v1/cluster on two stages: what the ranks are, their steps while somebody looks, and the trace."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from serving import Reply, Server, serving

from labinfer.planner.workload import read_workload

SMALL = ("--dtype", "float32", "--num-kv-blocks", "512")
LATENCIES = ("ttft", "time_per_output_token")
COMPUTES = {"prepare", "run", "sample"}


@pytest.fixture(scope="module", params=["mpirun", pytest.param("torchrun", marks=pytest.mark.slow)])
def server(request) -> Iterator[Server]:
    with serving(*SMALL, "-pp", "2", launcher=request.param, ranks=2) as server:
        yield server
        server.wait_idle()
        assert "Traceback" not in server.text


@contextmanager
def load(server: Server, num_users: int = 4) -> Iterator[None]:
    """Requests one after another, as long as this lasts."""
    over = threading.Event()

    def ask(user: int) -> None:
        while not over.is_set():
            reply = server.ask("POST", "/v1/completions", body(f"user {user}"))
            assert reply.status == 200, reply.body

    with ThreadPoolExecutor(num_users) as pool:
        users = [pool.submit(ask, user) for user in range(num_users)]
        try:
            yield
        finally:
            over.set()
        for user in users:
            user.result()


def body(prompt: str) -> dict:
    return {"prompt": prompt, "max_tokens": 60, "ignore_eos": True}


def look(server: Server, seconds: float, model: str = "demo") -> list[dict]:
    """What comes in so many seconds."""
    reply = server.ask("GET", f"/v1/cluster/events?model={model}&seconds={seconds}")
    assert reply.status == 200 and reply.headers["Content-Type"].startswith("text/event-stream")
    *events, done = [part for part in reply.body.split("\n\n") if part and not part.startswith(":")]
    assert done == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in events]


def test_what_the_ranks_are(server):
    status, cluster = server.get("/v1/cluster")
    assert status == 200
    assert cluster["experts"] == [], "the demo model has none"
    assert abs(cluster["time_us"] - time.time() * 1e6) < 10e6
    assert cluster["model"] == "demo" and cluster["pipeline_schedule"] == "1f1b"
    assert (cluster["num_blocks"], cluster["num_window_blocks"]) == (512, 0)
    assert [(one["rank"], one["stage"], one["tp_rank"]) for one in cluster["ranks"]] == [(0, 0, 0), (1, 1, 0)]
    assert [(one["first_layer"], one["num_layers"]) for one in cluster["ranks"]] == [(0, 3), (3, 3)]
    for one in cluster["ranks"]:
        assert one["host"] == socket.gethostname() and one["device"] == "cpu"
        assert one["dtype"] == one["kv_dtype"] == "float32" and one["quantization"] == "none"
        assert one["weight_bytes"] > 1 << 20
        assert one["kv_bytes"] == cluster["ranks"][0]["kv_bytes"]


@pytest.fixture(scope="module")
def looked(server) -> tuple[list[dict], Reply]:
    """Three seconds of events under load, and the trace of two of them."""
    with load(server), ThreadPoolExecutor(1) as pool:
        events = pool.submit(look, server, 3)
        trace = server.ask("GET", "/v1/cluster/trace?seconds=2")
        return events.result(), trace


def test_steps_are_seen_while_they_run(looked):
    events, _ = looked
    figures = [one for one in events if one["object"] == "cluster.stats"]
    assert 4 <= len(figures) <= 9, "about twice a second"
    assert max(one["generation_tokens_per_second"] for one in figures) > 10
    assert all(one["running"] + one["waiting"] <= 4 and 0 < one["seconds"] < 2 for one in figures)
    assert max(one["running"] for one in figures) == 4 and max(one["sequences"] for one in figures) == 4
    assert all(0 < figures[-1][name]["p50"] <= figures[-1][name]["p99"] < 10 for name in LATENCIES)
    assert figures[-1]["queue_time"]["p99"] < figures[-1]["ttft"]["p99"]
    assert 0 <= figures[-1]["prefix_cache_hit_rate"] <= 1 and figures[-1]["preemptions"] == 0
    assert any(all(rank["busy"] for rank in one["ranks"]) and len(one["ranks"]) == 2 for one in figures)
    seen = [one for one in events if one["object"] == "cluster.steps"]
    assert len(seen) >= 3
    steps = {step["step"]: step for one in seen for step in one["steps"]}
    assert any(step["prefill_tokens"] for step in steps.values())
    assert any(step["decode_tokens"] for step in steps.values())
    for step in steps.values():
        assert step["num_sequences"] == len(step["sequences"]) <= 4
        assert sum(one["tokens"] for one in step["sequences"]) == step["prefill_tokens"] + step["decode_tokens"]
        assert all(len(one["request"]) == 32 for one in step["sequences"])
    computed = {0: set(), 1: set()}
    for one in seen:
        for rank in one["ranks"]:
            for name, begin, end, step in rank["slices"]:
                assert one["begin_us"] <= begin <= end <= one["end_us"]
                if name in COMPUTES:
                    computed[rank["rank"]].add(step)
    both = computed[0] & computed[1]
    assert len(both) > 20, "the ranks tell of the same steps"
    assert len(both & set(steps)) > 20
    assert abs(time.time() * 1e6 - seen[-1]["end_us"]) < 60e6


def test_trace_of_some_seconds_has_a_track_for_each_rank(looked):
    _, reply = looked
    assert reply.headers["Content-Disposition"] == 'attachment; filename="labinfer-trace.json"'
    events = reply.body["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {0: "rank 0 (stage 0, tp 0)", 1: "rank 1 (stage 1, tp 0)"}
    for rank in (0, 1):
        steps = [one for one in events if one["ph"] == "X" and one["pid"] == rank and one["name"] == "step"]
        assert len(steps) > 20
        assert all({"step", "tokens", "decodes"} == set(one["args"]) and one["dur"] >= 0 for one in steps)


def test_trace_is_of_as_many_seconds_as_were_asked_for(server):
    with load(server):
        time.sleep(1)  # whoever looked before is not to help
        events = server.ask("GET", "/v1/cluster/trace?seconds=1").body["traceEvents"]
    times = [(one["ts"], one["ts"] + one["dur"]) for one in events if one["ph"] == "X"]
    # Of short steps the first of each half second are told of, so the last half may be without any.
    assert 0.5e6 < max(end for _, end in times) - min(begin for begin, _ in times) < 1.5e6


@pytest.mark.parametrize("path", ["/v1/cluster", "/v1/cluster/events", "/v1/cluster/trace?seconds=60"])
def test_who_asks_for_a_head_alone_looks_at_nothing(server, path):
    begin = time.monotonic()
    reply = server.ask("HEAD", path)
    assert (reply.status, reply.body) == (200, "") and time.monotonic() - begin < 5


def test_nothing_is_recorded_when_whoever_looked_has_gone_away(server):
    with load(server):
        with server.connect() as connection:
            connection.sendall(b"GET /v1/cluster/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            data = b""
            while b"cluster.steps" not in data:
                data += connection.recv(1 << 16)
        look(server, 1)  # and comes to the end of it
        time.sleep(1.2)  # what was under way has come
        count = len(server.get("/v1/cluster/trace")[1]["traceEvents"])
        assert count > 100
        time.sleep(1.5)
        assert len(server.get("/v1/cluster/trace")[1]["traceEvents"]) == count


def test_figures_of_the_last_minutes_are_there_for_who_comes_later(server, looked):
    _, cluster = server.get("/v1/cluster")
    assert max(one["generation_tokens_per_second"] for one in cluster["history"]) > 10
    assert [one["time_us"] for one in cluster["history"]] == sorted(one["time_us"] for one in cluster["history"])
    assert [(one["stage"], one["rank"]) for one in cluster["stages"]] == [(0, 0), (1, 1)]
    assert all(0 < one["step_seconds"] < 1 and one["slowdown"] is None for one in cluster["stages"])
    assert (cluster["machine_links"], cluster["plan"]) == ([], None)
    assert [(one["threads"], bool(one["cpus"])) for one in cluster["ranks"]] == [(1, True)] * 2


@pytest.mark.parametrize("path", ["/v1/cluster/events", "/v1/cluster/trace"])
@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "ten", "", "1e9"])
def test_seconds_that_are_none(server, path, seconds):
    reply = server.ask("GET", f"{path}?seconds={seconds}")
    reply.check_error(400, "invalid_request_error", None)
    assert reply.error["param"] == "seconds" and repr(seconds) in reply.error["message"]


@pytest.mark.parametrize("path", ["/v1/cluster", "/v1/cluster/events", "/v1/cluster/trace", "/v1/cluster/workload"])
def test_model_that_is_not_served(server, path):
    server.ask("GET", f"{path}?model=other").check_error(404, "invalid_request_error", "model_not_found")


def test_sizes_of_requests_are_a_workload(server, tmp_path):
    text = "the sea and the sky and the wind over the water " * 3
    for fields in ({}, {"max_tokens": 5, "n": 2}, {"stream": True}):
        server.post(
            "/v1/completions", {"prompt": text, "max_tokens": 3, "temperature": 1.0, "ignore_eos": True} | fields
        )
    server.post("/v1/embeddings", {"input": text})  # for which nothing is generated
    reply = server.ask("GET", "/v1/cluster/workload")
    assert reply.status == 200 and reply.headers["Content-Type"] == "application/jsonl"
    assert "sea" not in reply.body
    path = tmp_path / "day.jsonl"
    path.write_text(reply.body)
    requests = read_workload(str(path)).requests[-4:]
    length = requests[0].prompt
    assert length > 20 and [(r.prompt, r.output) for r in requests] == [(length, n) for n in (3, 5, 5, 3)]
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    assert requests[0].cached == 0 < requests[1].cached == requests[3].cached < requests[2].cached == length - 1


@pytest.mark.parametrize("query", ["?models=demo", "?model=demo&model=demo", "?=1"])
def test_query_that_means_nothing(server, query):
    server.ask("GET", f"/v1/cluster{query}").check_error(400, "invalid_request_error", None)


def test_two_models_are_looked_at_apart_until_the_end():
    with serving(*SMALL, "--model", "one=demo", "--model", "two=demo") as server, ThreadPoolExecutor(2) as pool:
        one, two = (pool.submit(look, server, 3, name) for name in ("one", "two"))
        time.sleep(0.5)
        ask = body("for one") | {"model": "one", "max_tokens": 300}
        assert server.ask("POST", "/v1/completions", ask).status == 200
        assert any(event["object"] == "cluster.steps" and event["steps"] for event in one.result())
        assert not any(event["object"] == "cluster.steps" and event["steps"] for event in two.result())
        looking = pool.submit(look, server, 60, "one")
        time.sleep(1)
        server.process.terminate()
        assert isinstance(looking.result(timeout=20), list), "who looks is told of the end"


@pytest.mark.slow
def test_plan_and_links_of_a_start_that_was_planned_are_told():
    layout = ("--layout", "auto", "--threads", "1")
    with serving(*SMALL, *layout, launcher="mpirun", ranks=2, nodes=("node-a", "node-b")) as server:
        _, cluster = server.get("/v1/cluster")
        assert "predicted:" in cluster["plan"] and "node-a" in cluster["plan"]
        (link,) = cluster["machine_links"]
        assert {link["a"], link["b"]} == {"node-a", "node-b"} and 0 < link["latency"] < 1 < link["bytes_per_second"]
