"""``launch.py verify``: a job that ran with --reproducible, recomputed on other layouts; changes of it and of its model are found."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest

from labinfer.weights.resolve import resolve_model

FLAGS = ("--num-kv-blocks", "300")
NUM_LINES = 24
CHAT = [{"role": "user", "content": "What is red?"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A copy of the demo model."""
    return Path(
        shutil.copytree(resolve_model("demo", "", may_download=False), tmp_path_factory.mktemp("verify") / "model")
    )


def batch_line(number: int, **body) -> dict:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}


def input_lines() -> list[dict]:
    """Lines of all forms, one of them invalid."""
    draw = random.Random(1)
    lines = []
    for number in range(NUM_LINES):
        prompt = [draw.randrange(5, 500) for _ in range(draw.randrange(3, 60))]
        lines.append(
            {
                "prompt_token_ids": prompt,
                "max_tokens": 12,
                "ignore_eos": True,
                "temperature": number % 3,
                "seed": number,
            }
        )
    lines[3] = {
        "prompt": "red blue",
        "n": 2,
        "temperature": 1,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "max_tokens": 9,
        "ignore_eos": True,
    }
    lines[5] = batch_line(5, prompt="red blue", logprobs=2, max_tokens=9, ignore_eos=True, temperature=1, seed=4)
    lines[9] = batch_line(9, messages=CHAT, logprobs=True, top_logprobs=2, max_tokens=9, ignore_eos=True)
    lines[11] = {"prompt": "x", "max_tokens": -1}
    return lines


@pytest.fixture(scope="module")
def job(directory, launches) -> Path:
    """Output of a job on one rank, beside its input, report and journal."""
    folder = directory.parent / "job"
    folder.mkdir()
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in input_lines()))
    out = folder / "out.jsonl"
    files = ("--input", folder / "in.jsonl", "--output", out, "--report", folder / "report.json")
    done = launches.run("single", 1, "--model", directory, *files, *FLAGS, "--reproducible", "--max-num-seqs", "5")
    assert done.returncode == 1 and "1 of 24 lines failed" in done.stderr, done.text
    fingerprint = json.loads((folder / "report.json").read_text())["fingerprint"]
    assert f"\nfingerprint            {fingerprint}\n" in done.stderr, done.text
    return out


@pytest.fixture
def copy(job, tmp_path) -> Path:
    """A copy of the job's output, with its journal, to be damaged."""
    for name in ("out.jsonl", "out.jsonl.journal"):
        shutil.copy(job.with_name(name), tmp_path)
    return tmp_path / "out.jsonl"


def test_job_says_what_its_answers_depend_on(job):
    report = json.loads(job.with_name("report.json").read_text())
    assert report["reproducible"] is True and report["output"] == str(job)
    assert {"model weights", "tokenizer", "dtype", "kernels", "LABInfer version"} <= report["fingerprint_parts"].keys()
    records = [json.loads(line) for line in job.read_text().splitlines()]
    bodies = [record["response"]["body"] for record in records if record.get("custom_id")]
    assert len(bodies) == 2 and {body["system_fingerprint"] for body in bodies} == {report["fingerprint"]}
    assert all(choice["token_ids"] for body in bodies for choice in body["choices"])


@pytest.mark.parametrize(
    "layout", [("single", 1), ("mpirun", 3, "-pp", "3"), ("mpirun", 3, "-tp", "3")], ids=["one rank", "pp 3", "tp 3"]
)
def test_all_lines_agree_on_other_layouts(job, directory, launches, layout):
    launcher, ranks, *flags = layout
    own = job if ranks == 1 else job.with_name("report.json")
    done = launches.run(launcher, ranks, "verify", own, "--model", directory, *FLAGS, *flags, "--max-num-seqs", "2")
    assert done.returncode == 0, done.text
    assert "23 of 23 lines recomputed, all agree: 276 tokens, 36 of them with log-probabilities" in done.stdout, (
        done.text
    )


def edit(out: Path, number: int, change) -> None:
    """Change one output line in place."""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    change(lines[number])
    out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def test_one_changed_token_or_logprob_is_found(copy, directory, launches):
    original = copy.read_text()
    records = [json.loads(line) for line in original.splitlines()]
    (number,) = [index for index, record in enumerate(records) if record.get("id") == 4]
    token = records[number]["choices"][1]["token_ids"][6]

    def change_token(record: dict) -> None:
        record["choices"][1]["token_ids"][6] = token + 1

    def change_logprob(record: dict) -> None:
        record["choices"][0]["logprobs"][2]["logprob"] += 1e-7

    for change, text in (
        (change_token, f"token 7 of choice 1: expected {token + 1}, found {token}"),
        (change_logprob, "log-probabilities of token 3 of choice 0: expected"),
    ):
        copy.write_text(original)
        edit(copy, number, change)
        done = launches.run("single", 1, "verify", copy, "--model", directory, *FLAGS)
        assert done.returncode == 1 and "23 of 23 lines recomputed, 1 differ" in done.stdout, done.text
        assert f"line {number + 1} of {copy} (input line 4), {text}" in done.stdout, done.text


@pytest.fixture
def changed_model(directory, tmp_path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "model"))


def change_byte(path: Path) -> None:
    """Change the lowest bit of one weight in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 & ~1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("model.safetensors", change_byte, "model weights"),
        ("tokenizer.json", lambda path: path.write_text(path.read_text().rstrip() + "\n\n"), "tokenizer"),
    ],
)
def test_changed_model_is_named_without_computing(job, changed_model, launches, name, change, part):
    change(changed_model / name)
    done = launches.run("mpirun", 2, "verify", job, "--model", changed_model, *FLAGS)
    assert done.returncode == 1, done.text
    differs, not_computed = done.stdout.splitlines()
    assert differs.startswith(f"fingerprint differs in {part}: ") and f"/{name} has changed" in differs, done.text
    assert not_computed == f"{job}: not recomputed, as its answers depend on what differs"


def test_other_dtype_is_named(job, directory, launches):
    done = launches.run("single", 1, "verify", job, "--model", directory, *FLAGS, "--dtype", "float32")
    assert done.returncode == 1 and "fingerprint differs in dtype: was bfloat16, is float32" in done.stdout, done.text


def truncate(out: Path) -> None:
    out.write_bytes(out.read_bytes()[:-3])


def drop_line(out: Path) -> None:
    out.write_text("".join(out.read_text().splitlines(keepends=True)[1:]))


def drop_token_ids(out: Path) -> None:
    edit(out, 0, lambda record: record.clear())


def damage_journal(out: Path) -> None:
    Path(f"{out}.journal").write_text("{}\n")


def remove_journal(out: Path) -> None:
    Path(f"{out}.journal").unlink()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (truncate, "the last line of .* is truncated"),
        (drop_line, "has 23 lines, and its journal records 24"),
        (drop_token_ids, "line 1 of .* has no answer with token_ids"),
        (damage_journal, "is not a job's journal"),
        (remove_journal, "is neither the output of a job"),
        (Path.unlink, "cannot read .*: No such file"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_file_is_one_line(copy, directory, launches, damage, text):
    damage(copy)
    done = launches.run("mpirun", 2, "verify", copy, "--model", directory, *FLAGS)
    assert done.returncode == 2 and len(done.our_errors) == 1, done.text
    assert re.search(text, done.our_errors[0]) and "Traceback" not in done.stderr, done.text
