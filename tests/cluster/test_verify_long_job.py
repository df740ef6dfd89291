"""``launch.py verify`` of a job of 10,000 tokens: it agrees on every layout, and one changed token is found, wherever it is verified."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from checkpoints import VOCAB, make_checkpoint

NUM_LINES, NUM_TOKENS = 100, 100
FLAGS = ("--num-kv-blocks", "900", "--block-size", "16")
ONE_RANK, TP_3, PP_3 = ("single", 1), ("mpirun", 3, "-tp", "3"), ("mpirun", 3, "-pp", "3")
NAMES = {ONE_RANK: "one rank", TP_3: "tp 3", PP_3: "pp 3"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model", "qwen3-moe")


@pytest.fixture(scope="module")
def make_job(directory, tmp_path_factory, launches):
    """Make the job on a layout, once for each. Returns its output."""
    draw = random.Random(7)
    lines = [
        {
            "prompt_token_ids": [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 40))],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": number % 2 * 0.9,
            "seed": number,
        }
        for number in range(NUM_LINES)
    ]
    text, made = "".join(json.dumps(line) + "\n" for line in lines), {}

    def make(layout: tuple) -> Path:
        if layout not in made:
            folder = tmp_path_factory.mktemp("job")
            (folder / "in.jsonl").write_text(text)
            made[layout] = folder / "out.jsonl"
            files = ("--input", folder / "in.jsonl", "--output", made[layout])
            launcher, ranks, *flags = layout
            done = launches.run(
                launcher, ranks, "--model", directory, *files, *flags, *FLAGS, "--dtype", "bfloat16", "--reproducible"
            )
            assert done.returncode == 0, done.text
        return made[layout]

    return make


def verify(launches, layout: tuple, out: Path, directory: Path):
    launcher, ranks, *flags = layout
    own = ("--dtype", "bfloat16", "--max-num-seqs", "40", "--sample", str(NUM_LINES))
    return launches.run(launcher, ranks, "verify", out, "--model", directory, *FLAGS, *flags, *own)


@pytest.mark.parametrize(
    ("made_on", "verified_on"),
    [(ONE_RANK, PP_3), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((TP_3, ONE_RANK), (PP_3, TP_3)))],
    ids=NAMES.get,
)
def test_job_agrees_on_another_layout(make_job, directory, launches, made_on, verified_on):
    done = verify(launches, verified_on, make_job(made_on), directory)
    assert done.returncode == 0 and "100 of 100 lines recomputed, all agree: 10000 tokens" in done.stdout, done.text


@pytest.mark.parametrize("layout", [ONE_RANK, pytest.param(TP_3, marks=pytest.mark.slow)], ids=NAMES.get)
def test_one_changed_token_of_10000_is_found(make_job, directory, launches, tmp_path, layout):
    for path in (job := make_job(ONE_RANK), Path(f"{job}.journal")):
        shutil.copy(path, tmp_path)
    out = tmp_path / job.name
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert sum(len(record["token_ids"]) for record in records) == NUM_LINES * NUM_TOKENS
    draw = random.Random(layout[1])
    index, place = draw.randrange(NUM_LINES), draw.randrange(NUM_TOKENS)
    token_ids, number = records[index]["token_ids"], records[index]["id"]
    right = token_ids[place]
    token_ids[place] = wrong = (right + 1) % VOCAB
    out.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    done = verify(launches, layout, out, directory)
    assert done.returncode == 1 and "100 of 100 lines recomputed, 1 differ" in done.stdout, done.text
    place_text = f"line {index + 1} of {out} (input line {number}), token {place + 1}: expected {wrong}, found {right}"
    assert f"first difference: {place_text}\n" in done.stdout, done.text
