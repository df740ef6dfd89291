"""A provider with kernels that crash, hang, raise and are wrong by 1 %: each is named and dropped, and the answers stay."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkpoints import mixed_prompts
from launchers import LAUNCH, Finished, run

PLUGIN = '''"""Kernels with faults, and a right one."""

import os
import signal
import time

from labinfer import register
from labinfer.functions.provider import Provider
from labinfer.functions.reference import attention, elementwise

NUMBER = {number!r}  # another file for each test, whose trials are not cached


def note(text):
    with open({notes!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{text}}\\n")


def crashes(*arguments):
    note("crashes")
    os.kill(os.getpid(), signal.SIGSEGV)


def ends(*arguments):
    note("ends")
    os._exit(3)


def hangs(*arguments):
    note("hangs")
    time.sleep(1000)


def is_wrong(*arguments):
    note("is_wrong")
    return attention.paged_attention(*arguments) * 1.01


note("imported")


@register("function_provider", "faulty")
class Faulty(Provider):
    def register(self, registry, group_size):
        calls = {{
            "add_rms_norm": crashes,
            "rotate_and_write": ends,
            "silu_and_mul": hangs,
            "paged_attention": is_wrong,
            "argmax": lambda logits_BV: logits_BV.kernel_of_tomorrow(),
            "gelu_and_mul": elementwise.gelu_and_mul,
        }}
        registry.add_all(calls, name="faulty")
'''
DROPPED = {
    "add_rms_norm": "crashes: was ended by SIGSEGV, for 3 tokens in float32",
    "rotate_and_write": "crashes: ended with exit code 3, for 3 tokens in float32",
    "silu_and_mul": "hangs: no result within 6 s, for 3 tokens in float32",
    "paged_attention": "differs from the reference by 0.01 times its largest number, more than 0.0001, for 3 tokens",
    "argmax": "raises: ",
}
TRIED = "trying the kernels of this device and of plugins once"
MAX_DELAY = 10.0
"""Seconds by which faulty kernels may delay the first start."""
MAX_LATER_DELAY = 1.0
"""Seconds of noise in the difference of two starts that do the same."""


@pytest.fixture
def notes(tmp_path) -> Path:
    """File in which each process that has the plugin notes what it runs."""
    return tmp_path / "notes"


@pytest.fixture
def plugin(tmp_path, notes) -> Path:
    path = tmp_path / "faulty.py"
    path.write_text(PLUGIN.format(number=os.urandom(8).hex(), notes=str(notes)))
    return path


def take_notes(notes: Path) -> tuple[int, set[str]]:
    """Number of processes that imported the plugin since the last call, and the faulty kernels that ran."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    notes.unlink()
    importers = {pid for pid, text in lines if text == "imported"}
    return len(importers), {text for _, text in lines} - {"imported"}


def answer(tmp_path: Path, launcher: str, ranks: int, *flags: object, **env: str) -> tuple[Finished, list[list[int]]]:
    """A job of some prompts, and the tokens of its answers."""
    given, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    answers.unlink(missing_ok=True)
    fields = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
    prompts = mixed_prompts(3)
    given.write_text("".join(json.dumps({"prompt_token_ids": ids} | fields) + "\n" for ids in prompts))
    named = ("--dtype", "float32", "--log-level", "info", "--input", given, "--output", answers)
    done = run(launcher, ranks, LAUNCH, *named, *flags, **env)
    assert done.returncode == 0, done.text
    lines = sorted(map(json.loads, answers.read_text().splitlines()), key=lambda line: line["id"])
    return done, [line["token_ids"] for line in lines]


def dropped(done: Finished) -> list[str]:
    """Texts of the dropped kernels that rank 0 logs."""
    start = "labinfer: kernel dropped, the reference is used: "
    return [line.removeprefix(start) for line in done.stderr.splitlines() if line.startswith(start)]


@pytest.mark.parametrize(
    ("launcher", "ranks", "flags"),
    [
        pytest.param("single", 1, (), id="one rank"),
        pytest.param("torchrun", 2, ("-tp", "2"), id="tp 2", marks=pytest.mark.slow),
        pytest.param("mpirun", 2, ("-pp", "2"), id="pp 2", marks=pytest.mark.slow),
    ],
)
def test_each_fault_is_named_and_dropped(plugin, notes, tmp_path, launcher, ranks, flags):
    """In the first start after trials in another process; the second one starts no process for trials, and runs none of the kernels."""
    _, expected = answer(tmp_path, launcher, ranks, *flags)
    for number in range(2):
        done, tokens = answer(tmp_path, launcher, ranks, *flags, "--plugin", plugin)
        assert tokens == expected
        found = dropped(done)
        assert len(found) == len(DROPPED), done.text
        for function, text in DROPPED.items():
            assert any(line.startswith(f"{function}=faulty {text}") for line in found), done.text
        assert (TRIED in done.stderr) == (number == 0), done.text
        importers, called = take_notes(notes)
        if number == 0:
            assert importers > ranks and called == {"crashes", "ends", "hangs", "is_wrong"}
        else:
            assert (importers, called) == (ranks, set())


@pytest.mark.timing
def test_faulty_kernels_delay_only_the_first_start(plugin, notes, tmp_path):
    """One that crashes, one that hangs and one that is wrong by 1 %."""
    usual = min(answer(tmp_path, "single", 1)[0].seconds for _ in range(2))
    first, second = (answer(tmp_path, "single", 1, "--plugin", plugin)[0] for _ in range(2))
    delays = first.seconds - usual, second.seconds - usual
    assert {"add_rms_norm", "silu_and_mul", "paged_attention"} <= {line.partition("=")[0] for line in dropped(second)}
    assert delays[0] <= MAX_DELAY and delays[1] <= MAX_LATER_DELAY, delays


@pytest.mark.slow
def test_faults_of_an_accelerators_kernels_are_dropped(plugin, tmp_path, fake_device):
    """On the make-believe accelerator, whose other functions are torch's operations."""
    env = fake_device("musa", "no-float64", "late-copies")
    plugin.write_text(plugin.read_text().replace('name="faulty"', 'name="faulty", devices=("musa",)'))
    _, expected = answer(tmp_path, "single", 1, "--functions", "reference")
    done, tokens = answer(tmp_path, "single", 1, "--plugin", plugin, "--device", "musa", **env)
    assert tokens == expected and TRIED in done.stderr
    found = dropped(done)
    for function, text in DROPPED.items():
        assert any(line.startswith(f"{function}=faulty {text}") for line in found), done.text


def test_a_faulty_kernel_that_is_chosen_by_name_is_refused(plugin):
    done = run("single", 1, LAUNCH, "--plugin", plugin, "--functions", "argmax=faulty", "--prompt", "x")
    (line,) = done.our_errors
    assert done.returncode == 2, done.text
    assert "--functions argmax=faulty raises: --plugin faulty:" in line
    assert "AttributeError: 'Tensor' object has no attribute 'kernel_of_tomorrow'" in line
    assert line.endswith("fix it, or leave it out")
