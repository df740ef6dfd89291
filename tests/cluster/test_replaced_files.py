"""Files of a model that are replaced while it is served or runs a job: no answer goes on with another model's tokens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hosts import Hosts, needs_hosts
from launchers import BIN, LAUNCH, command, descendants, finish, kill_tree, matrix, start
from safetensors.torch import load_file, save_file
from serving import Server, rank_number, serving, wait_for

from labinfer.weights.resolve import resolve_model

LAYOUT = ("--dtype", "float32", "--no-autotune")
PROMPT = {"prompt": "red blue", "max_tokens": 1900}


@pytest.fixture
def directory(tmp_path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(resolve_model("demo", "", may_download=False), tmp_path / "model"))


def replace_weights(directory: Path) -> Path:
    """Replace a model's weights by others of the same names, shapes and file size, which differ only in the middle of the file.
    Returns the path of the old file."""
    path, old = directory / "model.safetensors", directory.parent / "old.safetensors"
    shutil.copyfile(path, old)
    tensors = load_file(path)
    names = sorted(name for name in tensors if ".mlp." in name and tensors[name].ndim == 2)
    for name in names[len(names) // 3 : len(names) // 2]:
        tensors[name] = tensors[name].roll(1, dims=0).contiguous()
    save_file(tensors, directory.parent / "new.safetensors", metadata={"format": "pt"})
    os.replace(directory.parent / "new.safetensors", path)
    assert path.stat().st_size == old.stat().st_size
    return old


def copy_back(directory: Path) -> None:
    """Copy the weights onto themselves: other times and another inode, the same contents."""
    copy = directory / "copy"
    shutil.copyfile(directory / "model.safetensors", copy)
    os.replace(copy, directory / "model.safetensors")


def kill_rank(server: Server, rank: int) -> None:
    os.kill(server.rank_pid(rank), signal.SIGKILL)
    wait_for(lambda: "; restarting" in server.text, 20)


@pytest.mark.parametrize(("launcher",), matrix(("mpirun",)))
def test_open_streams_end_with_an_error_and_new_requests_have_the_new_weights(launcher, directory):
    with serving(
        "--model", f"m={directory}", *LAYOUT, "-pp", "2", launcher=launcher, ranks=2, supervised=True
    ) as server:
        before = server.complete(max_tokens=40, temperature=0, ignore_eos=True).body["choices"][0]["text"]
        touched = server.stream(PROMPT).wait_begun()
        copy_back(directory)
        os.utime(directory / "tokenizer.json")
        kill_rank(server, 1)
        assert touched.finish(90).error is None and touched.text.startswith(before)
        stream = server.stream(PROMPT).wait_begun()
        replace_weights(directory)
        os.kill(server.rank_pid(0), signal.SIGKILL)
        error = stream.finish(60).error
        assert error["code"] == "engine_failed" and f"{directory}/model.safetensors has changed" in error["message"]
        wait_for(lambda: server.get("/ready")[0] == 200, 60)
        after = server.complete(max_tokens=40, temperature=0, ignore_eos=True).body["choices"][0]["text"]
        assert after != before
        (line,) = [line for line in server.text.splitlines() if "model m now serves the new files" in line]
        assert "that ended with an error: 1" in line
        stream = server.stream(PROMPT).wait_begun()  # which the old files do not concern any more
        os.kill(server.rank_pid(1), signal.SIGKILL)
        assert stream.finish(90).error is None and stream.text.startswith(after)


@pytest.mark.slow
def test_idle_server_takes_up_a_new_tokenizer_and_says_so(directory):
    with serving("--model", f"m={directory}", *LAYOUT, launcher="mpirun", ranks=1, supervised=True) as server:

        def token_ids() -> list[int]:
            return server.post("/tokenize", {"prompt": "red blue", "add_special_tokens": False})[1]["tokens"]

        before = token_ids()
        path = directory / "tokenizer.json"
        values = json.loads(path.read_text())
        vocabulary = values["model"]["vocab"]
        spelled = {number: token for token, number in vocabulary.items()}
        other = next(
            token for token in vocabulary if vocabulary[token] not in before and token not in spelled[before[0]]
        )
        first = spelled[before[0]]
        vocabulary[first], vocabulary[other] = vocabulary[other], vocabulary[first]
        path.write_text(json.dumps(values))
        kill_rank(server, 0)
        wait_for(lambda: server.get("/ready")[0] == 200, 60)
        assert token_ids() == [vocabulary[first], *before[1:]] != before
        (line,) = [line for line in server.text.splitlines() if "model m now serves the new files" in line]
        assert f"{path} has changed" in line and "that ended with an error: 0" in line


def test_another_layout_is_refused_and_streams_go_on_from_the_weights_in_memory(directory):
    with serving("--model", str(directory), *LAYOUT, "-pp", "2", launcher="mpirun", ranks=2) as server:
        undisturbed = server.stream(PROMPT).finish(60).text
        stream = server.stream(PROMPT).wait_begun()
        old = replace_weights(directory)
        status, answer = server.post("/v1/cluster/layout", {"layers": [4, 2]})
        assert status == 409 and f"{directory}/model.safetensors has changed" in answer["error"]["message"], answer
        assert stream.finish(60).error is None and stream.text == undisturbed
        os.replace(old, directory / "model.safetensors")
        stream = server.stream(PROMPT).wait_begun()
        assert server.post("/v1/cluster/layout", {"layers": [4, 2]})[0] == 200
        assert stream.finish(60).error is None and stream.text == undisturbed


@pytest.mark.parametrize(("launcher",), matrix(("mpirun",)))
def test_job_stops_and_goes_on_once_the_old_weights_are_back(launcher, directory, launches, tmp_path):
    source, out, undisturbed = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    lines = [{"prompt_token_ids": [5 + i] * 20, "max_tokens": 100, "ignore_eos": True} for i in range(60)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--model", directory, "--input", source, "--max-num-seqs", "2", "--max-inflight", "1", *LAYOUT]
    assert launches.run("single", 1, *flags, "--output", undisturbed).returncode == 0
    flags += ["--output", out, "--resume", "-pp", "2"]
    process = start(command("single", 1, LAUNCH, "supervise", "--", *command(launcher, 2, LAUNCH, *flags)))
    try:
        wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") >= 5, 60)
        os.kill(next(pid for pid in descendants(process.pid) if rank_number(pid) == 1), signal.SIGKILL)
        old = replace_weights(directory)
        done = finish(process, 90)
    finally:
        kill_tree(process)
    assert done.returncode == 2, done.text
    (line,) = done.our_errors[-2:-1]
    assert f"{directory}/model.safetensors has changed since; restore the old files" in line, done.text
    answers = {record["id"]: record for record in map(json.loads, undisturbed.read_text().splitlines())}
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert 5 <= len(written) < 60 and all(record == answers[record["id"]] for record in written)
    os.replace(old, directory / "model.safetensors")
    done = launches.run("single", 1, *flags[:-2])
    assert done.returncode == 0 and f"{len(written)} lines are already done" in done.stderr, done.text
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == 60 and {record["id"]: record for record in written} == answers


def check_refused(text: str, directory: Path, hosts: tuple[str, str]) -> None:
    (line,) = [line for line in text.splitlines() if line.startswith("labinfer: error:")]
    other = directory.with_name("other")
    assert f"{other}/model.safetensors on {hosts[1]} and {directory}/model.safetensors on {hosts[0]} differ" in line


def other_version(directory: Path) -> Path:
    """A copy of a model with other weights."""
    other = Path(shutil.copytree(directory, directory.with_name("other")))
    replace_weights(other)
    return other


def test_two_versions_on_two_nodes_are_refused_under_mpirun(directory):
    ranks = [
        ["-n", "1", "-env", "LABINFER_NODE_NAME", node, sys.executable, LAUNCH, "--model", str(path), "-pp", "2"]
        for node, path in (("host-0", directory), ("host-1", other_version(directory)))
    ]
    done = finish(start([str(BIN / "mpirun"), *ranks[0], "--prompt", "x", ":", *ranks[1], "--prompt", "x"]), 90)
    assert done.returncode == 2, done.text
    check_refused(done.stderr, directory, ("host-0", "host-1"))


@pytest.mark.slow
@needs_hosts
def test_two_versions_on_two_nodes_are_refused_under_torchrun(directory, tmp_path):
    with Hosts.made(2, tmp_path) as hosts:
        agents = [
            *hosts.torchrun(1, "--model", directory, "--prompt", "x", "-pp", "2", numbers=[0]),
            *hosts.torchrun(1, "--model", other_version(directory), "--prompt", "x", "-pp", "2", numbers=[1]),
        ]
        done = [finish(agent, 90) for agent in agents]
    assert all(each.returncode for each in done)
    check_refused("".join(each.stderr for each in done), directory, ("host-0", "host-1"))
