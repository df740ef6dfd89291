"""The launch environment in real launches: what is detected, threads, per-stage options, no pickle, the Python API."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from launchers import LAUNCH, Finished, command, finish, free_port, matrix, run, start

NO_PICKLE = "tests/cluster/no_pickle_launch.py"

SHORT = ("--prompt", "x", "--raw", "--max-tokens", "8", "--ignore-eos", "--log-level", "info")


@pytest.fixture(scope="module")
def alone(model, launches) -> Finished:
    """A short run on one rank."""
    return launches.run("single", 1, "--model", model, *SHORT)


def test_launcher_and_threads_are_printed_with_what_decided_them(model, alone):
    assert "single process on" in alone.stderr
    mpich = run("mpirun", 2, LAUNCH, "--model", model, *SHORT, OMP_NUM_THREADS="5").stderr
    assert "launcher mpich (by PMI_RANK=0): rank 0 of 2" in mpich
    assert "5 CPU threads per rank (OMP_NUM_THREADS=5)" in mpich
    # torchrun sets one thread, but a rank alone has all cores.
    torchrun = run("torchrun", 1, LAUNCH, "--model", model, *SHORT).stderr
    assert "launcher torchrun (by LOCAL_RANK=0" in torchrun
    assert f"{len(os.sched_getaffinity(0))} CPU thread" in torchrun


def test_slurm_variables_are_enough(model, alone):
    """Two processes with srun's variables meet without torchrun or MPI."""
    common = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_ID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    arguments = command("single", 1, LAUNCH, "--model", model, *SHORT)
    ranks = [start(arguments, SLURM_PROCID=str(r), SLURM_LOCALID=str(r), **common) for r in (0, 1)]
    done = [finish(process, 60) for process in ranks]
    assert [d.returncode for d in done] == [0, 0], done[0].text + done[1].text
    assert "launcher slurm (by SLURM_PROCID=0): rank 0 of 2, local rank 0 of 2" in done[0].stderr
    assert done[0].stdout == alone.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two ranks")
@pytest.mark.parametrize(("launcher",), matrix(("torchrun",)))
def test_each_rank_stays_on_cores_of_its_own(launcher, model, tmp_path):
    figures = figures_of(launcher, 2, model, tmp_path)
    first, second = map(cpu_set, figures["cpus"])
    assert not first & second
    assert first | second == os.sched_getaffinity(0)
    assert 0 < figures["threads"][0] <= len(first) and 0 < figures["threads"][1] <= len(second)


@pytest.mark.parametrize(("launcher",), matrix(("mpirun",)))
def test_more_ranks_than_cores_keep_the_mask_they_were_given_and_run_one_thread_each(launcher, model, tmp_path):
    mask = os.sched_getaffinity(0)
    one = max(mask)
    os.sched_setaffinity(0, {one})  # the launch inherits it
    try:
        figures = figures_of(launcher, 2, model, tmp_path)
    finally:
        os.sched_setaffinity(0, mask)
    assert figures["cpus"] == [str(one)] * 2
    assert figures["threads"] == [1, 1]


@pytest.mark.parametrize(("launcher",), matrix(("torchrun",)))
def test_spare_ranks_have_no_part_and_leave_with_the_others(launcher, model, alone, launches, tmp_path):
    """The model runs on ranks 2 and 0, in that order."""
    report = tmp_path / "report.json"
    layout = ["--ranks", "2,0", "--pipeline-parallel-size", "2"]
    done = launches.run(launcher, 3, "--model", model, *SHORT, *layout, "--report", report)
    assert done.returncode == 0, done.text
    assert done.stdout == alone.stdout
    assert "spare rank: 1" in done.stderr
    rows = [line.split() for line in done.stderr.splitlines() if line.strip()[:1].isdigit()]
    assert [(row[0], row[2]) for row in rows[:2]] == [("0", "1"), ("2", "0")]  # rank and stage
    assert json.loads(report.read_text())["ranks"] == [0, 2]


@pytest.mark.parametrize(("launcher",), matrix(("torchrun",)))
def test_spare_rank_drafts(launcher, model, alone, launches, tmp_path):
    report = tmp_path / "report.json"
    speculation = json.dumps({"model": model, "num_speculative_tokens": 3, "draft_rank": 2})
    layout = ["--ranks", "0,1", "--pipeline-parallel-size", "2", "--speculative-config", speculation]
    done = launches.run(launcher, 3, "--model", model, *SHORT, *layout, "--report", report)
    assert done.returncode == 0, done.text
    assert done.stdout == alone.stdout
    assert f"draft model on rank 2: {model}" in done.stderr and "spare rank" not in done.stderr
    figures = json.loads(report.read_text())
    assert figures["ranks"] == [0, 1] and figures["speculation"]["accepted"] > 0


def figures_of(launcher: str, ranks: int, model: str, tmp_path: Path) -> dict:
    """The report of a short run."""
    report = tmp_path / "report.json"
    done = run(launcher, ranks, LAUNCH, "--model", model, *SHORT, "--report", report)
    assert done.returncode == 0, done.text
    return json.loads(report.read_text())


def cpu_set(text: str) -> set[int]:
    """``0-2,5`` → {0, 1, 2, 5}."""
    ranges = [part.partition("-") for part in text.split(",")]
    return {cpu for begin, _, end in ranges for cpu in range(int(begin), int(end or begin) + 1)}


@pytest.mark.parametrize(("launcher",), matrix(("torchrun",)))
def test_tp_layers_dtype_and_threads_are_given_per_stage_and_nothing_is_pickled(launcher, model, tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"id": "ids", "prompt_token_ids": [5, 6, 7], "max_tokens": 8, "ignore_eos": True},
        {"id": "text", "prompt": "the quick", "max_tokens": 8, "temperature": 1.0},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["-tp", "2,1", "-pp", "2", "--layers", "3,1", "--dtype", "float32,bfloat16", "--threads", "3"]
    done = run(launcher, 3, NO_PICKLE, "--model", model, "--input", path, "--output", out, *flags)
    assert done.returncode == 0, done.text
    records = {record["id"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert records.keys() == {"ids", "text"} and len(records["ids"]["token_ids"]) == 8
    assert "3 CPU threads per rank (--threads)" in done.stderr
    rows = [line.split() for line in done.stderr.splitlines() if line.strip()[:1].isdigit()]
    # rank, device, stage, tp, layers, dtype
    assert [row[2:6] for row in rows[:3]] == [
        ["0", "0", "0-2", "float32"],
        ["0", "1", "0-2", "float32"],
        ["1", "0", "3-3", "bfloat16"],
    ]


def test_plan_shows_the_layout_without_starting_its_ranks(model, launches):
    done = launches.run("single", 1, "plan", "--model", model, "-tp", "3,1", "--num-kv-blocks", "100")
    assert done.returncode == 0, done.text
    assert "single process" not in done.stderr, "what was asked for comes first"
    title, gap, *lines = done.stdout.splitlines()
    assert (title, gap) == (f"{model} in 2 stages on 4 ranks, as if all ranks were on this machine", "")
    assert lines[0].split()[:7] == ["rank", "device", "stage", "tp", "layers", "dtype", "weights"]
    assert lines[0].split()[7:] == ["KV/token", "KV", "tokens"], "this model has no recurrent states"
    assert len([line for line in lines if line.split()[:1] and line.split()[0].isdigit()]) == 4
    assert any("100 blocks (1600 tokens)" in line for line in lines)


@pytest.mark.parametrize(("launcher",), matrix(("mpirun",)))
def test_bench_comm_prints_every_call(launcher, launches):
    done = launches.run(launcher, 2, "bench", "comm")
    assert done.returncode == 0, done.text
    rows = [line.split("  ") for line in done.stdout.splitlines()[2:]]
    calls = {row[0].strip() for row in rows}
    assert calls == {"all-reduce", "gather", "send (one way)", "command to all"}
    assert ("mpi" if launcher == "mpirun" else "gloo") in done.stdout
    latencies = [float(row.split()[-2]) for row in done.stdout.splitlines()[2:]]
    assert all(latency > 0 for latency in latencies)


API_SCRIPT = """
import sys
from labinfer import LLM, SamplingParams

llm = LLM(sys.argv[1], pipeline_parallel_size=int(sys.argv[2]))
params = SamplingParams(max_tokens=4, ignore_eos=True)
outputs = llm.generate([[5, 6, 7], "the quick", {"prompt_token_ids": [9]}, [{"role": "user", "content": "hi"}]], params)
if llm.group.rank == 0:
    assert [len(output.token_ids) for output in outputs] == [4, 4, 4, 4]
    assert all(output.finish_reason == "length" and output.num_cached_tokens == 0 for output in outputs)
    assert all(output.time_to_first_token > 0 and isinstance(output.text, str) for output in outputs)
else:
    assert outputs is None
again = llm.generate([5, 6, 7] if llm.group.rank == 0 else None, params)
if llm.group.rank == 0:
    assert again[0].token_ids == outputs[0].token_ids
    try:
        llm.generate([[5], []], params)
        raise AssertionError("an empty prompt was taken")
    except ValueError as error:
        assert str(error) == "prompt 1: the prompt is empty; give at least one token"
else:
    llm.generate(None)
if sys.argv[3:] == ["raise"] and llm.group.rank == llm.group.size - 1:
    raise KeyError("from a user's script")
llm.close()
print("rank", llm.group.rank, "is done", flush=True)
"""


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        pytest.param("single", 1, marks=pytest.mark.slow),
        ("mpirun", 2),
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
    ],
)
def test_python_api(launcher, ranks, model, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(API_SCRIPT)
    done = run(launcher, ranks, str(script), model, str(ranks))
    assert done.returncode == 0, done.text
    assert done.stdout.count("is done") == ranks


@pytest.mark.parametrize(("launcher",), matrix(("mpirun",)))
def test_exception_in_a_users_script_ends_all_ranks(launcher, model, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(API_SCRIPT)
    done = run(launcher, 2, str(script), model, "2", "raise", timeout=30)
    assert done.returncode != 0
    assert done.seconds < 15
    assert done.own_stderr.count('KeyError: "from a user\'s script"') == 1


TWO_MODELS_SCRIPT = """
import sys, time
from labinfer import LLM, SamplingParams

params = SamplingParams(max_tokens=4, ignore_eos=True)
ranks = [int(rank) for rank in sys.argv[2:]]
options = {"ranks": ranks} if ranks else {}
first = LLM(sys.argv[1], pipeline_parallel_size=2, **options)
second = LLM(sys.argv[1], tensor_parallel_size=2, **options)
tokens = [llm.generate([[5, 6, 7]], params) for llm in (first, second)]
first.close()
third = LLM(sys.argv[1], pipeline_parallel_size=2, **options)
tokens.append(third.generate([[5, 6, 7]], params))
if third.group.rank == 0:
    time.sleep(3)  # works on alone, long after the other rank has left the script; nobody called close
    assert tokens[0][0].token_ids == tokens[1][0].token_ids == tokens[2][0].token_ids
    print("rank 0 is done", flush=True)
"""


@pytest.mark.parametrize(("launcher", "ranks"), matrix(("mpirun", "2 0"), over=[("",), ("2 0",)]), ids=str)
def test_several_models_and_a_script_that_never_closes_them(launcher, ranks, model, tmp_path):
    """On all ranks, and with a spare one."""
    script = tmp_path / "script.py"
    script.write_text(TWO_MODELS_SCRIPT)
    done = run(launcher, 3 if ranks else 2, str(script), model, *ranks.split(), timeout=60)
    assert done.returncode == 0, done.text
    assert "rank 0 is done" in done.stdout


def test_run_broken_off_in_the_middle_of_a_step_is_not_gone_on_with(model):
    from labinfer import LLM, SamplingParams
    from labinfer.base.errors import UserError

    llm = LLM(model, threads=1)
    llm._parts.worker.runner.sampler = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5]], SamplingParams(max_tokens=2))
    with pytest.raises(UserError, match="create a new LLM"):
        llm.generate([[5]], SamplingParams(max_tokens=2))


def test_one_conversation_is_one_prompt(model):
    from labinfer import LLM, SamplingParams

    llm = LLM(model, threads=1, tokenizer=None)
    messages = [{"role": "user", "content": "hi"}]
    one = llm.generate(messages, SamplingParams(max_tokens=3))
    assert [o.token_ids for o in one] == [o.token_ids for o in llm.generate([messages], SamplingParams(max_tokens=3))]
    assert llm.generate([]) == []
