"""The comparison with other engines: how figures are taken, and what is made of them. No engine is run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import compare
import harness
import pytest
import setup_peers
from compare import ENGINES, OURS, PRECISIONS, Launcher, last_json, markdown, medians, ratios, split_name

from labinfer.cli.bench.workloads import draw_workloads

ROUNDS = [
    {
        "int8": {
            OURS: {"W1": 30.0, "W2": 100.0},
            "vllm": {"W1": 10.0, "W2": 200.0},
            "openvino": {"W1": 20.0, "W2": 50.0},
        }
    },
    {
        "int8": {
            OURS: {"W1": 60.0, "W2": 300.0},
            "vllm": {"W1": 40.0, "W2": 200.0},
            "openvino": {"W1": 30.0, "W2": 60.0},
        }
    },
    {"int8": {OURS: {"W1": 50.0, "W2": 200.0}, "vllm": {"W1": 25.0, "W2": 400.0}}},
]


def test_long_contexts_are_beside_the_three_workloads():
    workloads = draw_workloads()
    assert set(compare.USUAL_WORKLOADS) <= set(workloads)
    assert [workloads[name].length for name in ("W1", "W1-4k", "W1-16k")] == [256, 4128, 16128]


def test_workloads_are_the_same_in_every_process_and_as_documented():
    first, second = draw_workloads(), draw_workloads()
    assert first == second
    assert [[len(first[name].prompts[0]), *first[name].output_lens] for name in ("W1", "W3")] == [[128, 128], [2048, 1]]
    assert len(first["W2"].prompts) == len(first["W2"].output_lens) == 32
    assert all(64 <= len(prompt) <= 512 for prompt in first["W2"].prompts)
    assert all(32 <= length <= 128 for length in first["W2"].output_lens)


def test_fewer_requests_are_the_first_ones_and_other_workloads_stay():
    few, all_of_them = draw_workloads(8), draw_workloads()
    assert few["W2"].prompts == all_of_them["W2"].prompts[:8]
    assert few["W2"].output_lens == all_of_them["W2"].output_lens[:8]
    assert {**few, "W2": None} == {**all_of_them, "W2": None}


class Clocked:
    """An engine that takes a second for each 100 tokens read and for each 10 written, on a clock of its own.

    Args:
        tells: whether it tells of tokens as they come.
    """

    def __init__(self, monkeypatch, tells: bool):
        self.now, self._tells = 0.0, tells
        self.calls: list[list[int]] = []
        monkeypatch.setattr(harness.time, "perf_counter", lambda: self.now)

    def __call__(self, prompts, lengths, on_token):
        self.calls.append(lengths)
        self.now += sum(map(len, prompts)) / 100
        for _ in range(sum(lengths)):
            self.now += 0.1
            if self._tells:
                on_token()
        return list(lengths)


@pytest.mark.parametrize("tells", [False, True])
def test_figures_are_taken_from_the_outside(monkeypatch, tells):
    engine = Clocked(monkeypatch, tells)
    work = {
        "W1": {"figure": "decode", "prompts": [[1] * 100], "output_lens": [21]},
        "W2": {"figure": "batch", "prompts": [[1] * 100, [1] * 200], "output_lens": [10, 20]},
        "W3": {"figure": "prefill", "prompts": [[1] * 390], "output_lens": [1]},
    }
    found = harness.measure(engine, work)
    assert found == pytest.approx({"W1": 10.0, "W2": 30 / 6, "W3": 390 / 4})
    decode = [[21], [21]] if tells else [[21], [21], [1]]
    assert engine.calls == [*decode, [2, 2], [10, 20], [2], [1]]  # each after a warm-up


def test_engine_that_answers_less_is_caught():
    work = {"W1": {"figure": "batch", "prompts": [[1]], "output_lens": [5]}}
    with pytest.raises(RuntimeError, match=r"\[1\] tokens came, not of \[2\]"):
        harness.measure(lambda prompts, lengths, on_token: [1], work)


def runner_arguments(tmp_path, *more):
    (tmp_path / "workloads.json").write_text("{}")
    flags = ["--checkpoint", tmp_path, "--converted", tmp_path / "made" / "x-int8"]
    flags += ["--workloads", tmp_path / "workloads.json", "--precision", "int8", "--threads", "2", *more]
    return ["runner", *map(str, flags)]


def test_checkpoint_is_converted_once_and_whole(monkeypatch, tmp_path, capsys):
    tries = []

    def prepare(args: argparse.Namespace) -> None:
        tries.append(args.model)
        args.model.mkdir()
        (args.model / "weights").touch()
        if len(tries) == 1:
            raise RuntimeError("broken off")

    monkeypatch.setattr(sys, "argv", runner_arguments(tmp_path, "--prepare"))
    with pytest.raises(RuntimeError):
        harness.run("pytest", None, prepare)
    assert not (tmp_path / "made" / "x-int8").exists()
    for _ in range(2):
        harness.run("pytest", None, prepare)
    assert len(tries) == 2
    assert (tmp_path / "made" / "x-int8" / "weights").exists()
    assert json.loads(capsys.readouterr().out.split("\n")[1]) == {"version": pytest.__version__}


def test_engine_has_room_for_the_longest_request(monkeypatch, tmp_path):
    rooms = []

    def load(args: argparse.Namespace):
        rooms.append(args.context)
        return lambda prompts, lengths, on_token: list(lengths)

    for tokens in (100, 5000):
        monkeypatch.setattr(sys, "argv", runner_arguments(tmp_path))
        work = {"W": {"figure": "batch", "prompts": [[1] * tokens, [1]], "output_lens": [8, 9]}}
        (tmp_path / "workloads.json").write_text(json.dumps(work))
        harness.run("pytest", load)
    assert rooms == [4096, 5008]


def test_dtype_of_an_engine_goes_to_its_runner():
    assert split_name("openvino-bf16") == ("openvino", "bf16")
    assert split_name("vllm") == ("vllm", "")


def test_what_an_engine_does_not_offer_is_said(monkeypatch, tmp_path, capsys):
    def load(args: argparse.Namespace):
        raise harness.Unavailable(f"no {args.precision}")

    monkeypatch.setattr(sys, "argv", runner_arguments(tmp_path))
    harness.run("pytest", load)
    assert last_json(capsys.readouterr().out) == {"skip": "no int8"}


def test_line_of_figures_is_found_among_what_engines_print():
    assert last_json('{"not": "this"}\nloading {\n{"W1": 1.5}\n{broken\nbye') == {"W1": 1.5}
    assert last_json("nothing\n[1]\n") is None


def test_medians_and_ratios_are_over_rounds():
    assert medians(ROUNDS, "int8", "vllm") == {"W1": 25.0, "W2": 200.0}
    assert ratios(ROUNDS, "int8", "vllm") == {"W1": 2.0, "W2": 0.5}  # of 3, 1.5, 2 and of 0.5, 1.5, 0.5
    assert ratios(ROUNDS, "int8", "openvino") == {"W1": 1.75, "W2": 3.5}  # it has two rounds
    assert ratios(ROUNDS, "int4", "vllm") == {}


def test_table_names_the_hardest_peer_of_each_workload():
    lines = markdown(ROUNDS, ["W1", "W2"]).splitlines()
    assert f"| {OURS} | int8 | 50.0 | 200.0 |" in lines
    assert "| labinfer to vllm | int8 | 2.00 | 0.50 |" in lines
    assert lines[-1] == "| labinfer to the best | int8 | **1.75** (openvino) | **0.50** (vllm) |"
    assert len({line.count("|") for line in lines if line}) == 1
    assert markdown(ROUNDS, ["W1", "W2"], 8).startswith(
        "| engine | weights | W1 tokens/s | W2 (8 of 32 requests) tokens/s |"
    )


def test_share_of_the_limit_is_below_the_tokens_per_second():
    shares = {"int8": [{"W1": 0.8, "W2": 0.5}, {"W1": 0.9, "W2": 0.7}, {"W1": 0.7, "W2": 0.6}]}
    lines = markdown(ROUNDS, ["W1", "W2"], shares=shares).splitlines()
    assert (
        lines[lines.index(f"| {OURS} | int8 | 50.0 | 200.0 |") + 1] == f"| {OURS}, of the limit | int8 | 0.80 | 0.60 |"
    )


def test_every_peer_has_a_runner_and_a_recipe():
    assert {path.name for path in (compare.HERE / "peers").glob("*_runner.py")} == {
        f"{split_name(name)[0]}_runner.py" for name in ENGINES
    }
    assert set(setup_peers.RECIPES) == {split_name(name)[0] for name in ENGINES} - {OURS}
    assert all(set(precisions) <= set(PRECISIONS) for precisions in ENGINES.values())


def test_peer_that_is_not_installed_is_told_how(tmp_path, capsys):
    launcher = Launcher(argparse.Namespace(threads=1, envs=tmp_path), {}, tmp_path)
    assert not launcher.is_installed("vllm") and launcher.is_installed(OURS)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "vllm: not installed" in said and "setup_peers.py" in said


def test_torch_is_that_of_the_makefile():
    assert f"TORCH ?= {setup_peers.TORCH}\n" in (compare.HERE.parent / "Makefile").read_text()


def test_plotting_script_needs_matplotlib_to_draw_only():
    code = "import sys, plot; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=compare.HERE, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
