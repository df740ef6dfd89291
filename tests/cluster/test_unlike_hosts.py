"""One pipeline over hosts with different accelerators, of which each host's torch knows only its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from launchers import LAUNCH, Finished, matrix, run
from mtp_checkpoints import add_mtp

UNLIKE = str(Path(__file__).parent / "unlike_launch.py")
PROMPT = ("--prompt", "Name three rivers.", "--dtype", "float32", "--temperature", "0", "--max-tokens", "12")
NPU_AND_CPU = "npu@a,@b"


@pytest.fixture(scope="module")
def answer() -> str:
    """Answer of one CPU rank."""
    done = run("single", 1, LAUNCH, *PROMPT, "--device", "cpu")
    assert done.returncode == 0 and len(done.stdout) > 10, done.text
    return done.stdout


def refusals(done: Finished) -> list[str]:
    """Lines of the program on a refused launch."""
    assert done.returncode != 0 and "Traceback" not in done.own_stderr, done.text
    return done.our_errors


@pytest.mark.parametrize(
    ("launcher", "hosts", "device"),
    matrix(
        ("mpirun", NPU_AND_CPU, "auto"),
        over=[
            (NPU_AND_CPU, "auto"),
            (NPU_AND_CPU, "npu,cpu"),
            ("@a,npu@b", "cpu,npu"),
            ("npu@a,musa@b", "auto"),
            ("npu@a,musa@b,@c", "npu,musa,cpu"),
            ("sdaa@a,npu@b,npu@b", "auto"),
        ],
    ),
)
def test_hosts_of_which_each_knows_its_own_accelerator(launcher, hosts, device, fake_device, answer):
    count = len(hosts.split(","))
    done = run(launcher, count, UNLIKE, hosts, *PROMPT, "--device", device, "-pp", str(count), **fake_device(""))
    assert (done.returncode, done.stdout) == (0, answer), done.text


@pytest.mark.slow
@pytest.mark.parametrize(("launcher",), matrix(*[(name,) for name in ("mpirun", "torchrun")]))
def test_activations_between_accelerators_do_not_pass_the_host(launcher, fake_device, answer, tmp_path):
    """A CPU stage follows, and one rank is spare."""
    flags = ("--device", "npu,npu,cpu", "-pp", "3", "--ranks", "0,1,2")
    done = run(launcher, 4, LAUNCH, *PROMPT, *flags, **fake_device("npu"), FAKE_DEVICE_COUNTS=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, answer), done.text
    counts = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    senders = [lines for each in counts if (lines := [line for line in each.get("d2h", ()) if "/comm/" in line])]
    assert len(senders) == 1, counts  # stage 1, to the CPU


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_accelerators_shown_one_by_one_are_separate(launcher, fake_device, answer):
    flags = ("--device", "npu", "-tp", "2", "--log-level", "info")
    done = run(launcher, 2, LAUNCH, *PROMPT, *flags, **fake_device("npu", "one-card"))
    assert done.returncode == 0 and done.stdout.startswith(answer.rstrip()), done.text
    assert "labinfer: stage 0: all-reduces of ranks 0-1 use hccl" in done.stderr and " share " not in done.stderr


@pytest.mark.slow
def test_ranks_that_share_an_accelerator_are_named(fake_device, answer):
    done = run("torchrun", 3, LAUNCH, *PROMPT, "--device", "npu", "-pp", "3", **fake_device("npu"))
    assert (done.returncode, done.stdout) == (0, answer), done.text
    (line,) = [line for line in done.stderr.splitlines() if " share " in line]
    assert line.startswith("labinfer: ranks 0, 2 share npu:0 on ")


@pytest.mark.slow
def test_tp_of_a_name_without_a_library_goes_through_host_memory(fake_device, answer):
    flags = ("--device", "sdaa", "-tp", "2", "--log-level", "info")
    done = run("torchrun", 2, LAUNCH, *PROMPT, *flags, **fake_device("sdaa"))
    assert done.returncode == 0 and done.stdout.startswith(answer.rstrip()), done.text
    assert "labinfer: stage 0: all-reduces of ranks 0-1 go through host memory (gloo)" in done.stderr


@pytest.mark.slow
def test_accelerator_without_memory_figures_of_torch(fake_device, answer):
    done = run("single", 1, LAUNCH, *PROMPT, "--device", "musa", **fake_device("musa", "no-memory-info"))
    assert (done.returncode, done.stdout) == (0, answer), done.text


@pytest.mark.slow
def test_accelerator_without_any_memory_figures_needs_the_number_of_blocks(fake_device, answer, tmp_path):
    script = tmp_path / "no_figures.py"
    script.write_text(
        f"import runpy, torch\ndel type(torch.npu).mem_get_info\nrunpy.run_path({LAUNCH!r}, run_name='__main__')\n"
    )
    env = fake_device("npu", "no-memory-info")
    (line,) = refusals(run("torchrun", 2, str(script), *PROMPT, "--device", "npu", "-tp", "2", **env))
    assert line == (
        "labinfer: error: torch does not tell the free memory of npu:0, which the size of the KV cache depends on; "
        "give --num-kv-blocks"
    )
    (line,) = refusals(run("single", 1, str(script), "probe", "--device", "npu", "--dtype", "float32", **env))
    assert line.endswith("give a layout by flags, with --num-kv-blocks")
    done = run("single", 1, str(script), *PROMPT, "--device", "npu", "--num-kv-blocks", "100", **env)
    assert (done.returncode, done.stdout) == (0, answer), done.text


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_mtp_drafts_over_two_accelerators(launcher, fake_device, tmp_path):
    model = make_checkpoint(tmp_path / "model", "qwen3.5")
    add_mtp(model, "qwen3.5", noise=0.0)
    flags = ("--model", str(model), "--dtype", "float32", "--output", "-", "--max-tokens", "16", "--temperature", "0")
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [5, 6, 7, 8], "ignore_eos": true}\n')
    job = (*flags, "--input", str(tmp_path / "prompts.jsonl"))
    expected = run("single", 1, LAUNCH, *job, "--device", "cpu")
    config = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')
    done = run(launcher, 2, LAUNCH, *job, "--device", "npu", "-tp", "2", *config, **fake_device("npu"))
    assert expected.returncode == done.returncode == 0, expected.text + done.text
    tokens = [json.loads(each.stdout.splitlines()[0])["token_ids"] for each in (expected, done)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "device", "carrier"),
    [("npu@a,npu@a", "npu", "hccl"), ("npu@a,npu@a", "npu:0", "gloo"), ("npu@a,musa@b", "auto", "gloo")],
)
def test_bench_comm_takes_the_carrier_of_a_run(hosts, device, carrier, fake_device):
    done = run("torchrun", 2, UNLIKE, hosts, "bench", "comm", "--device", device, **fake_device(""))
    assert done.returncode == 0, done.text
    sums = [line.split() for line in done.stdout.splitlines() if line.startswith("all-reduce")]
    assert sums and all(row[1] == carrier for row in sums), done.stdout


@pytest.mark.slow
def test_node_with_an_accelerator_and_a_cpu_rank_is_measured_as_two_machines(fake_device, tmp_path, answer):
    flags = ("--dtype", "float32", "--threads", "1", "--no-autotune", "--device", "npu,cpu")
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    done = run("mpirun", 2, UNLIKE, "npu@a,@a", "probe", *flags, **fake_device(""), **home)
    assert done.returncode == 0, done.text
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("a/npu", "a/cpu"))]
    assert [row[0] for row in rows[:2]] == ["a/npu", "a/cpu"], done.stdout
    assert "make-believe npu" in done.stdout and "1 thread" in done.stdout
    planned = run("mpirun", 2, UNLIKE, "npu@a,@a", *PROMPT, *flags, "--layout", "auto", **fake_device(""), **home)
    assert (planned.returncode, planned.stdout) == (0, answer), planned.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "flags", "text"),
    [
        (NPU_AND_CPU, ("--device", "npu", "-pp", "2"), "--device npu: torch * of rank 1 on b supports only cpu"),
        ("npu@a,musa@b", ("--device", "npu", "-pp", "2"), "of rank 1 on b supports cpu and 2 x musa"),
        ("npu@a,npu@a", ("--device", "npu:2", "-pp", "2"), "--device npu:2: torch * of rank 0 on a supports cpu and 2"),
        (
            "npu@a,npu@b",
            ("--device", "npu,npu,npu", "-pp", "2"),
            "has 3 values for 2 stages; give one, or one per stage",
        ),
    ],
)
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_missing_devices_are_one_line_with_the_rank(launcher, hosts, flags, text, fake_device):
    (line,) = refusals(run(launcher, 2, UNLIKE, hosts, *PROMPT, *flags, **fake_device("")))
    assert all(part in line for part in text.split("*")), line


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_plugin_that_does_not_load_is_one_line_with_its_cause(ranks, fake_device):
    launcher = "single" if ranks == 1 else "mpirun"
    done = run(launcher, ranks, LAUNCH, *PROMPT, "--device", "cpu", **fake_device("npu", "does-not-load"))
    (line,) = refusals(done)
    assert line.startswith("labinfer: error: torch's plugin fake_device does not load: libhccl.so: cannot open")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in line
