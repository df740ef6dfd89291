"""A server and a job whose ranks die under ``launch.py supervise``: a pause, and not a token lost or doubled."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launchers import LAUNCH, command, descendants, finish, kill_tree, matrix, run, start
from many_streams import NUM_STREAMS, ask_all
from serving import Server, is_running, rank_number, serving, wait_for

SHARED = re.compile(r"/dev/shm/\S+")
LAYOUT = ("--dtype", "float32", "-pp", "2", "--no-autotune")


@pytest.mark.slow
def test_streams_go_on_when_torchrun_starts_its_workers_again():
    """By itself: the supervisor does not notice, and the workers find their launcher's store as those before left it."""
    with serving(*LAYOUT, launcher="torchrun", ranks=2, supervised=True, PET_MAX_RESTARTS="2") as server:
        undisturbed = ask_all(server)
        for rank in (1, 0):
            with ThreadPoolExecutor(1) as threads:
                disturbed = threads.submit(ask_all, server)
                wait_for(lambda: server.metric("vllm:num_requests_running") >= NUM_STREAMS, 20)
                os.kill(server.rank_pid(rank), signal.SIGKILL)
                assert disturbed.result(90) == undisturbed
        assert "; restarting" not in server.text


@pytest.mark.parametrize(("launcher", "rank"), matrix(("mpirun", 1), over=[(0,), (1,)]))
def test_streams_go_on_when_a_rank_is_killed_and_nothing_is_left_of_a_killed_supervisor(launcher, rank):
    with serving(*LAYOUT, launcher=launcher, ranks=2, supervised=True) as server:
        undisturbed = ask_all(server)
        with ThreadPoolExecutor(1) as threads:
            disturbed = threads.submit(ask_all, server)
            wait_for(lambda: server.metric("vllm:num_requests_running") >= NUM_STREAMS, 20)
            time.sleep(0.3)
            os.kill(server.rank_pid(rank), signal.SIGKILL)
            wait_for(lambda: "; restarting" in server.text, 20)
            assert disturbed.result(90) == undisturbed
        server.wait_idle()
        check_killed_supervisor(server, launcher)


def check_killed_supervisor(server: Server, launcher: str) -> None:
    """Nothing is left of what it started. Not even in /dev/shm, where MPICH's segments have names until all ranks have opened
    them."""
    tree = server.processes
    if launcher == "mpirun":
        segments = [path for pid in tree for path in SHARED.findall(Path(f"/proc/{pid}/maps").read_text())]
        assert segments and not any(map(os.path.exists, segments))
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not any(map(is_running, tree)), 10)


@pytest.mark.slow
def test_request_that_ranks_die_of_is_given_up_and_fifteen_others_are_not_disturbed(tmp_path):
    def ask(prompt):
        stream = server.stream({"prompt": prompt, "max_tokens": 40, "temperature": 1.0, "seed": prompt[0]}).finish(120)
        return stream.error, stream.text

    script = tmp_path / "launch.py"  # by which a supervisor knows what it starts
    script.symlink_to(Path(__file__).with_name("poisonous_launch.py"))
    with (
        serving(*LAYOUT, launcher="mpirun", ranks=2, script=str(script), supervised=True) as server,
        ThreadPoolExecutor(16) as threads,
    ):
        prompts = [[number] * 20 for number in range(10, 25)]
        undisturbed = list(threads.map(ask, prompts))
        begin = time.monotonic()
        poison = threads.submit(ask, [7, 7, 7])
        disturbed = list(threads.map(ask, prompts))
        error, _ = poison.result(120)
        print(f"16 requests, one of them poisonous: {time.monotonic() - begin:.1f} s")
        assert error["code"] == "engine_failed" and "2 times while it ran this request" in error["message"]
        assert disturbed == undisturbed and all(not error for error, _ in disturbed)
        assert "(restart 2)" in server.text and "(restart 3)" not in server.text


@pytest.mark.slow
def test_twenty_restarts_leave_descriptors_threads_and_memory_as_they_were():
    """torchrun starts its workers again at once, so the twenty take no pauses."""

    def measure(pid: int) -> tuple[int, int, float]:
        status = Path(f"/proc/{pid}/status").read_text()
        megabytes = int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1e3
        return len(os.listdir(f"/proc/{pid}/fd")), int(re.search(r"Threads:\s+(\d+)", status)[1]), megabytes

    with serving(
        "--no-autotune", "-tp", "2", launcher="torchrun", ranks=2, supervised=True, PET_MAX_RESTARTS="20"
    ) as server:
        kept, figures = (server.process.pid, server.gateway_pid), []
        for restart in range(21):
            assert server.complete().status == 200
            figures.append([*map(measure, kept), len(os.listdir("/dev/shm"))])
            print(restart, *figures[-1])
            if restart < 20:
                before = server.rank_pid(restart % 2)
                os.kill(before, signal.SIGKILL)
                wait_for(lambda: server.get("/ready")[0] == 503, 20)
                wait_for(lambda: server.get("/ready")[0] == 200, 60)
        (first_supervisor, first_gateway, first_segments), last = figures[2], figures[-1]
        assert last[0][:2] == first_supervisor[:2] and last[1][1] == first_gateway[1]
        assert last[1][0] <= first_gateway[0] + 1  # the connection that has just been used
        assert last[2] <= first_segments + 1  # others have theirs
        assert last[0][2] < first_supervisor[2] + 1 and last[1][2] < first_gateway[2] + 10


def test_signal_while_ranks_start_again_ends_all_with_an_error_for_who_waits():
    with serving("--no-autotune", launcher="mpirun", ranks=1, supervised=True) as server:
        stream = server.stream({"max_tokens": 1900}).wait_begun()
        before = server.rank_pid(0)
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: any(rank_number(pid) == 0 for pid in server.processes if pid != before), 20)
        tree = server.processes
        assert server.stop() == 128 + signal.SIGTERM
        error = stream.finish().error
        assert error["code"] == "draining" and "shutting down" in error["message"]
        wait_for(lambda: not any(map(is_running, tree)), 10)


def test_wrong_flag_of_the_group_ends_the_supervisor(model):
    done = run("single", 1, LAUNCH, "supervise", "--", "mpirun", "-n", "2", "python", LAUNCH, "serve", "--no-such-flag")
    assert done.returncode == 2 and "unknown option --no-such-flag" in done.our_errors[0]
    done = run("single", 1, LAUNCH, "supervise", "--", "python", LAUNCH, "--prompt", "x")
    assert done.returncode == 2 and "a job with --input FILE and --output FILE" in done.our_errors[0]
    group = ["torchrun", "--nproc-per-node", "2", LAUNCH, "serve"]
    done = run("single", 1, LAUNCH, "supervise", "--rejoin-timeout", "9", "--", *group)
    assert done.returncode == 2 and "--rejoin-timeout 9 needs an mpirun" in done.our_errors[0]
    done = run("single", 1, LAUNCH, "supervise")
    assert done.returncode == 2 and "supervise needs a command" in done.our_errors[0]


def test_job_goes_on_by_itself(model, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt_token_ids": [5 + i] * 20, "max_tokens": 40, "ignore_eos": True} for i in range(80)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--model", model, "--input", source, "--output", out, "-pp", "2", "--max-num-seqs", "4"]
    process = start(command("single", 1, LAUNCH, "supervise", "--", *command("mpirun", 2, LAUNCH, *flags)))
    try:
        wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") >= 5, 60)
        os.kill(next(pid for pid in descendants(process.pid) if rank_number(pid) == 1), signal.SIGKILL)
        done = finish(process, 90)
    finally:
        kill_tree(process)
    assert done.returncode == 0, done.text
    assert "; restarting" in done.stderr and "lines are already done" in done.stderr
    assert sorted(json.loads(line)["id"] for line in out.read_text().splitlines()) == list(range(1, 81))
