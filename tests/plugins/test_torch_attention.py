"""examples/plugins/torch_attention.py: attention in plain PyTorch, chosen by name or by measured times, and compared before it is used."""

from __future__ import annotations

import json
import shutil

import pytest
from checkpoints import mixed_prompts
from launchers import LAUNCH, ROOT, run

from labinfer import LLM, SamplingParams
from labinfer.native import compiler

PLUGIN = ROOT / "examples/plugins/torch_attention.py"
PROMPTS, NUM_TOKENS = mixed_prompts(4), 12
LAYOUTS = {"one rank": ("single", 1), "tp 2": ("torchrun", 2, "-tp", "2"), "pp 2": ("torchrun", 2, "-pp", "2")}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "tp 2" else pytest.mark.slow, id=name) for name in LAYOUTS]
)
def test_tokens_are_those_without_it(layout, tmp_path):
    """Sequences of other lengths together, whose last blocks are not full."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(dtype="float32", threads=1) as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS, sampling)]
    given, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    given.write_text("".join(json.dumps({"prompt_token_ids": ids} | fields) + "\n" for ids in PROMPTS))
    launcher, ranks, *flags = LAYOUTS[layout]
    named = ("--plugin", PLUGIN, "--functions", "paged_attention=padded", "--dtype", "float32", "--log-level", "info")
    done = run(launcher, ranks, LAUNCH, *named, *flags, "--input", given, "--output", answers)
    assert done.returncode == 0 and done.stderr.count("kernels of plugins: paged_attention padded\n") == 1, done.text
    lines = sorted(map(json.loads, answers.read_text().splitlines()), key=lambda line: line["id"])
    assert [line["token_ids"] for line in lines] == expected


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="there is nothing to choose among")
def test_it_is_measured_beside_the_others():
    flags = ("--plugin", PLUGIN, "--autotune", "again", "--log-level", "info", "--prompt", "17 + 25 = ?")
    done = run("single", 1, LAUNCH, *flags)
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.text
    (line,) = (line for line in done.stderr.splitlines() if "functions, measured in" in line)
    chosen = line.partition("; paged_attention ")[2].partition(";")[0]
    assert chosen == "padded" or chosen.startswith("cpu"), line
    used = "paged_attention padded" if chosen == "padded" else "none, others are faster"
    assert f"labinfer: kernels of plugins: {used}\n" in done.stderr


@pytest.mark.parametrize(
    ("launcher", "layout"), [("single", ()), pytest.param("torchrun", ("-pp", "2"), marks=pytest.mark.slow)]
)
def test_it_is_dropped_where_it_reads_what_nobody_has_written(launcher, layout, tmp_path):
    careless = tmp_path / "careless.py"
    careless.write_text(PLUGIN.read_text().replace("    v_BKSP.masked_fill_(unseen_B11S.mT, 0)\n", ""))
    done = run(launcher, 2 if layout else 1, LAUNCH, "--plugin", careless, *layout, "--prompt", "17 + 25 = ?")
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.text
    dropped = (
        "kernel dropped, the reference is used: paged_attention=padded gives NaN where the reference gives numbers"
    )
    assert f"labinfer: {dropped}" in done.stderr, done.text


@pytest.mark.slow
def test_it_is_refused_by_name_where_it_computes_something_else(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(PLUGIN.read_text().replace("* heads.scale)", "* 2)"))
    named = ("--plugin", wrong, "--functions", "paged_attention=padded")
    done = run("single", 1, LAUNCH, *named, "--dtype", "float32", "--prompt", "x")
    (line,) = done.our_errors
    assert done.returncode == 2, done.text
    assert "--functions paged_attention=padded differs from the reference by" in line
    assert line.endswith("times its largest number, more than 0.0001, for 3 tokens in float32; fix it, or leave it out")


def test_it_is_refused_where_its_bits_may_depend_on_the_batch():
    done = run("single", 1, LAUNCH, "--plugin", PLUGIN, "--reproducible", "--prompt", "17 + 25 = ?")
    assert done.returncode == 2 and done.stderr.endswith(
        "error: --reproducible: the bits of the implementation padded from torch_attention may depend on the batch; "
        "leave that plugin out\n"
    ), done.text
