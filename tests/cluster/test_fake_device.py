"""The make-believe accelerator is what tests on it rely on, and a sample of what runs on it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from device_steps import device_steps
from golden_launches import SAMPLE_CASES, check, run_driver
from launchers import environment, run

SUMS = "x = torch.arange(4, device=NAME); y = x + 1; print(y.tolist(), y.device)"
EARLY = """
host = torch.zeros(4, dtype=torch.int32).pin_memory()
host.copy_(torch.arange(4, dtype=torch.int32, device=NAME), non_blocking=True)
done = torch.Event(NAME)
done.record()
print(host.tolist(), done.query())
done.synchronize()
print(host.tolist(), done.query())
"""
CHANGED = """
host = torch.arange(4).pin_memory()
host.to(NAME, non_blocking=True)
host[0] = 1
torch.accelerator.synchronize()
"""
REUSED = CHANGED.replace("torch.accelerator.synchronize()", "host.to(NAME, non_blocking=True)")
POISON = 0x7F7F7F7F
CLAIMS = {
    "sums": (SUMS, [], "[1, 2, 3, 4] npu:0"),
    "memory is poisoned": (
        "print(torch.empty(2, dtype=torch.int32, device=NAME).tolist())",
        [],
        f"[{POISON}, {POISON}]",
    ),
    "devices are not mixed": ("torch.mm(torch.ones(2, 2, device=NAME), torch.ones(2, 2))", [], "on the same device"),
    "cards are not mixed": (
        "torch.cat([torch.ones(2, device=f'{NAME}:{i}') for i in range(2)])",
        [],
        "found at least two devices, npu:0 and npu:1",
    ),
    "float64": ("print(torch.ones(2, device=NAME).double().sum().item())", [], "2.0"),
    "no float64": ("torch.ones(2, device=NAME).double()", ["no-float64"], "npu does not support DT_DOUBLE"),
    "memory figures": ("print(torch.accelerator.get_memory_info()[1] == torch.npu.mem_get_info()[1])", [], "True"),
    "no memory figures": ("torch.accelerator.get_memory_info()", ["no-memory-info"], "CachingDeviceAllocator.h"),
    "copies come at once": (EARLY, [], "[0, 1, 2, 3] True\n[0, 1, 2, 3] True"),
    "late downloads": (EARLY, ["late-copies"], f"[{POISON}, {POISON}, {POISON}, {POISON}] False\n[0, 1, 2, 3] True"),
    "late uploads": (CHANGED, ["late-copies"], "the host wrote to the source of the non-blocking copy at"),
    "sources are used again": (REUSED, ["late-copies"], "the host wrote to the source of the non-blocking copy at"),
    "does not load": ("", ["does-not-load"], "libhccl.so: cannot open shared object file"),
    "counts": (
        f"{SUMS}; x[torch.tensor([1])]; x[torch.tensor([1])] = 5; x.nonzero(); print({{k: sum(v.values()) for k, v in torch.npu.counts.snapshot().items()}})",
        [],
        "{'d2h': 1, 'h2d': 2, 'wait': 1}",
    ),
}
"""Code, switches, and what it prints or raises."""
THREADS = """
import asyncio, threading, torch
from labinfer import LLM, AsyncLLM, SamplingParams
from labinfer.server.host import async_llm

OPTIONS = {"model": "demo", "dtype": "float32", "device": "npu:1", "num_kv_blocks": 64}
FEW = SamplingParams(max_tokens=2)

def generate():
    llm.generate(["Hello"], FEW)
    print("LLM", torch.accelerator.current_device_index())

class Host(async_llm.EngineHost):
    def run(self):
        print("AsyncLLM", torch.accelerator.current_device_index())
        return super().run()

async def main():
    async with AsyncLLM(**OPTIONS) as llm:
        await llm.generate("Hello", FEW)

if __name__ == "__main__":
    with LLM(**OPTIONS) as llm:
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join()
    async_llm.EngineHost = Host
    asyncio.run(main())
"""
"""Prints the current device of a thread that calls an LLM, and of the AsyncLLM's own thread."""
FLOAT32 = {"model": "demo", "dtype": "float32", "device": ["npu"]}


def run_code(code: str, name: str = "npu", **env: str) -> subprocess.CompletedProcess:
    arguments = [sys.executable, "-c", f"import torch\nNAME = {name!r}\n{code}"]
    return subprocess.run(arguments, capture_output=True, text=True, env=environment(**env), timeout=60)


@pytest.mark.parametrize(
    "claim", [pytest.param(claim, marks=[] if "late" in claim else pytest.mark.slow) for claim in CLAIMS]
)
def test_claims(claim, fake_device):
    code, switches, expected = CLAIMS[claim]
    done = run_code(code, **fake_device("npu", *switches))
    assert expected in done.stdout + done.stderr


def test_host_cannot_read_a_card(fake_device):
    code = "import ctypes; x = torch.ones(2, device=NAME); print('made', flush=True); ctypes.string_at(x.data_ptr(), 1)"
    done = run_code(code, **fake_device("npu"))
    assert (done.stdout, done.returncode) == ("made\n", -signal.SIGSEGV)


def test_threads_that_run_steps_use_the_second_card(fake_device, tmp_path):
    """Torch's current device belongs to a thread, and is card 0 in a new one."""
    script = tmp_path / "threads.py"
    script.write_text(THREADS)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment(**fake_device("npu")),
        timeout=120,
    )
    assert done.stdout == "LLM 1\nAsyncLLM 1\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["musa", "sdaa"])
def test_other_names(name, fake_device):
    assert run_code(SUMS, name, **fake_device(name)).stdout == f"[1, 2, 3, 4] {name}:0\n"


@pytest.mark.slow
def test_one_card_is_visible(fake_device):
    env = fake_device("npu", "one-card") | {"LOCAL_RANK": "1"}
    code = "print(torch.npu.device_count(), torch.npu.get_device_properties(0).uuid.split('/')[1])"
    assert run_code(code, **env).stdout == "1 npu-1\n"


@pytest.mark.slow
def test_ranks_of_a_group_need_cards_of_their_own(fake_device, tmp_path):
    script = tmp_path / "sum.py"
    script.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "group = dist.new_group([0, 1], backend='hccl')\n"
        "x = torch.full((2,), rank + 1.0, device=f'npu:{rank * int(sys.argv[1])}')\n"
        "dist.all_reduce(x, group=group)\n"
        "both = torch.empty(4, device=x.device)\n"
        "dist.all_gather_into_tensor(both, x * rank, group=group)\n"
        "assert (x.tolist(), both.tolist()) == ([3, 3], [0, 0, 3, 3])\n"
    )
    shared, own = (run("torchrun", 2, str(script), cards, **fake_device("npu")) for cards in "01")
    assert own.returncode == 0, own.text
    assert shared.returncode != 0 and "hccl: duplicate device: ranks [0, 1] are on" in shared.stderr


def test_tokens_are_those_of_the_cpu(fake_device, tmp_path):
    """Greedy ones, also of prompts that are found again, and drawn ones."""
    kind, plain = "qwen2-tied", SAMPLE_CASES[0]
    cases = [(kind, *plain), (kind, "1f1b", 16, "hit")]
    layouts = {"card": [{"device": ["npu"]}, cases], "cpu": [{"device": ["cpu"]}, [(kind, *plain)]]}
    results = run_driver("single", 1, layouts, tmp_path, **fake_device("npu", "no-float64", "late-copies"))
    (on_cpu,) = results["cpu"].values()
    check(results["card"], len(cases), {kind: on_cpu["sampled"]})


def test_greedy_step_copies_its_indices_and_its_tokens(fake_device, tmp_path):
    (step,) = device_steps("single", 1, FLOAT32, [{}], tmp_path, fake_device("npu", "late-copies")).values()
    step.check(uploads=1, downloads=1)
