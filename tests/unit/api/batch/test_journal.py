"""The journal of a job, and the output that it belongs to, whenever a run dies."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from labinfer.api.batch.job_output import JobOutput
from labinfer.api.batch.journal import RECORD_BYTES, line_digest
from labinfer.api.batch.options import JobOptions
from labinfer.api.batch.recorded_job import RecordedRun
from labinfer.base.errors import UserError
from labinfer.launch.fingerprint import Fingerprint
from labinfer.weights.identity import FileIdentity

GIVEN = {"input": {"bytes": 3, "digest": "abc"}, "options": {"--temperature": 0.5, "--seed": 1}}
MODEL = {
    name: FileIdentity(path=f"/m/{name}", digest=name, is_sampled=name == "model.safetensors", stamps=["1"])
    for name in ("config.json", "model.safetensors")
}
RUN = RecordedRun(Fingerprint({"kernels": "a", "dtype": "float32"}, reproducible=True), {}, "/in.jsonl")
OTHER = msgspec.structs.replace(MODEL["model.safetensors"], digest="3")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def open_output(out) -> Iterator[Callable[..., JobOutput]]:
    """Begins a run over the output, whose lock the one before has lost by dying."""
    runs: list[JobOutput] = []

    def open_output(given=GIVEN, model=MODEL, run=RUN, **flags) -> JobOutput:
        while runs:
            runs.pop().close()
        runs.append(output := JobOutput(JobOptions(input="in.jsonl", output=str(out), **flags), {}, given))
        output.begin(model, run)
        return output

    yield open_output
    while runs:
        runs.pop().close()


def write(output: JobOutput, *numbers: int, failed: bool = False) -> None:
    for number in numbers:
        output.write({"id": number, "text": "答" * number}, number, line_digest(b"%d" % number), failed)


def ids(out: Path) -> list[int]:
    return [json.loads(line)["id"] for line in out.read_text(encoding="utf-8").splitlines()]


def journal_of(out: Path) -> Path:
    return out.with_name(out.name + ".journal")


def test_resumed_output_has_every_line_once_wherever_the_run_died(out, open_output):
    """Both files are cut at all moments of a run: within lines and records, and between a line and its record."""
    write(open_output(), 3, 1, 2)
    lines, journal = out.read_bytes(), journal_of(out).read_bytes()
    ends = [0, *(position + 1 for position, byte in enumerate(lines) if byte == ord("\n"))]
    header = len(journal) - 3 * RECORD_BYTES
    for done in range(3):
        moments = [(end, header + RECORD_BYTES * done) for end in range(ends[done], ends[done + 1] + 1)]
        moments += [(ends[done + 1], header + RECORD_BYTES * done + part) for part in range(RECORD_BYTES)]
        for num_bytes, journal_bytes in moments:
            out.write_bytes(lines[:num_bytes])
            journal_of(out).write_bytes(journal[:journal_bytes])
            output = open_output(resume=True)
            assert list(output.digests) == [3, 1, 2][:done]
            write(output, *[3, 1, 2][done:])
            assert out.read_bytes() == lines
            assert journal_of(out).read_bytes() == journal


def test_broken_record_ends_the_journal(out, open_output):
    write(open_output(), 1, 2, 3)
    data = bytearray(journal_of(out).read_bytes())
    data[-RECORD_BYTES - 10] ^= 1
    journal_of(out).write_bytes(data)
    output = open_output(resume=True)
    assert list(output.digests) == [1] and ids(out) == [1]
    write(output, 3, 2)
    assert list(open_output(resume=True).digests) == [1, 3, 2]


def test_resume_of_nothing_begins(out, open_output):
    write(open_output(resume=True), 1)
    assert ids(out) == [1]
    journal_of(out).write_bytes(b"")  # died before its header, and so before any line
    out.write_bytes(b"")
    assert open_output(resume=True).digests == {}


def test_output_of_an_earlier_run_is_not_destroyed(out, open_output):
    write(open_output(), 1)
    with pytest.raises(
        UserError, match=r"has 25 bytes of an earlier run; --resume continues it, --overwrite starts over"
    ):
        open_output()
    assert ids(out) == [1]
    write(open_output(overwrite=True), 2)
    assert ids(out) == [2]
    journal_of(out).unlink()
    with pytest.raises(UserError, match=r"has 28 bytes of an earlier run; --overwrite starts over$"):
        open_output()
    with pytest.raises(UserError, match=r"its journal, .*out.jsonl.journal, is missing"):
        open_output(resume=True)


@pytest.mark.parametrize(
    ("given", "model", "message"),
    [
        ({**GIVEN, "input": {"bytes": 4, "digest": "x"}}, MODEL, "another input: .* was .* and is"),
        ({**GIVEN, "input": {}}, MODEL, "another input: .* is not there"),
        ({**GIVEN, "options": {"--temperature": 0.5, "--seed": 2}}, MODEL, "other options: --seed was 1 and is 2"),
        (GIVEN, MODEL | {"model.safetensors": OTHER}, "another model: /m/model.safetensors has changed since"),
        (GIVEN, {"config.json": MODEL["config.json"]}, "another model: /m/model.safetensors has changed since"),
    ],
)
def test_change_of_what_answers_depend_on_is_refused(given, model, message, out, open_output):
    write(open_output(), 1)
    with pytest.raises(UserError, match=message):
        open_output(given, model, resume=True)
    assert ids(out) == [1]


def test_weights_that_were_written_to_with_the_same_samples_go_on_with_a_warning(out, open_output, caplog):
    write(open_output(), 1)
    written = msgspec.structs.replace(MODEL["model.safetensors"], stamps=["2"])
    open_output(GIVEN, MODEL | {"model.safetensors": written}, resume=True)
    assert "/m/model.safetensors was modified since the job started" in caplog.text
    assert ids(out) == [1]


def test_journal_of_another_version_is_refused(out, open_output):
    write(open_output(), 1)
    journal = journal_of(out)
    journal.write_bytes(journal.read_bytes().replace(b'{"journal": 2', b'{"journal": 1', 1))
    with pytest.raises(UserError, match="started by another version of LABInfer"):
        open_output(resume=True)
    journal.write_bytes(b'{"some": "file"}\n')
    with pytest.raises(UserError, match="is not a job's journal"):
        open_output(resume=True)
    assert ids(out) == [1]


def test_output_that_lost_lines_gets_them_again(out, open_output):
    write(open_output(), 1, 2)
    out.write_bytes(out.read_bytes()[:20])
    output = open_output(resume=True)
    assert list(output.digests) == [] and out.read_bytes() == b""
    write(output, 1, 2)
    assert list(open_output(resume=True).digests) == [1, 2] == ids(out)


def test_lines_that_failed_are_tried_again(out, open_output):
    output = open_output()
    write(output, 1)
    write(output, 2, failed=True)
    write(output, 3)
    assert list(open_output(resume=True).digests) == [1, 2, 3]
    output = open_output(retry_errors=True)
    assert list(output.digests) == [1, 3] == ids(out)
    write(output, 2)
    assert ids(out) == [1, 3, 2]
    assert list(open_output(resume=True).digests) == [1, 3, 2]
    assert {path.name for path in out.parent.iterdir()} == {out.name, journal_of(out).name}


def test_rewriting_that_was_broken_off_is_finished_or_forgotten(out, monkeypatch, open_output):
    """It dies at each of its two replacements."""
    replaced = os.replace
    for moment in (1, 2):
        output = open_output(overwrite=True)
        write(output, 1, 2)
        write(output, 3, failed=True)
        calls = []

        def die(source, target, calls=calls, moment=moment):
            calls.append(target)
            if len(calls) == moment:
                raise KeyboardInterrupt
            replaced(source, target)

        monkeypatch.setattr(os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            open_output(retry_errors=True)
        monkeypatch.setattr(os, "replace", replaced)
        output = open_output(resume=True)
        assert ids(out) == list(output.digests) == ([1, 2, 3] if moment == 1 else [1, 2])


def test_refused_job_leaves_no_journal(out, open_output):
    out.write_text("of another program")
    with pytest.raises(UserError, match="of an earlier run"):
        open_output()
    assert not journal_of(out).exists()
    out.unlink()
    JobOutput(JobOptions(input="in.jsonl", output=str(out)), {}, GIVEN).close()  # the model cannot be loaded
    assert not journal_of(out).exists()
    write(open_output(), 1)


def test_two_jobs_cannot_write_one_output(out, open_output):
    first = open_output()
    with pytest.raises(UserError, match="another job is writing to it"):
        JobOutput(JobOptions(input="in.jsonl", output=str(out), resume=True), {}, GIVEN)
    write(first, 1)


def test_resume_needs_files():
    for flags in ({"output": ""}, {"output": "-"}, {"output": "/dev/null"}, {"input": "", "output": "x"}):
        with pytest.raises(UserError, match="give its --input FILE and --output FILE"):
            JobOutput(JobOptions(**{"input": "in.jsonl", "resume": True} | flags), {}, GIVEN)


def test_random_deaths_leave_every_line_once(out, open_output):
    """Runs that die at random bytes, until one comes to its end."""
    draw = random.Random(0)
    begun, deaths = False, 0
    while True:
        output = open_output(resume=begun)
        begun = True
        todo = [number for number in range(1, 41) if number not in output.digests]
        write(output, *todo)
        if draw.random() < 0.02:
            break
        deaths += 1
        journal = journal_of(out).read_bytes()
        header = journal.index(b"\n") + 1
        entries = (len(journal) - header) // RECORD_BYTES - draw.randrange(0, 10)
        kept = header + max(0, entries) * RECORD_BYTES + draw.randrange(0, RECORD_BYTES)
        os.truncate(journal_of(out), min(kept, len(journal)))
        known = int.from_bytes(journal[header + (entries - 1) * RECORD_BYTES :][8:16], "little") if entries > 0 else 0
        os.truncate(out, max(known, out.stat().st_size - draw.randrange(0, 200)))
    assert deaths > 10
    assert sorted(ids(out)) == list(range(1, 41))


def test_reproducible_job_is_not_resumed_with_other_kernels(open_output, out):
    write(open_output(), 1)
    other = Fingerprint({"kernels": "b", "dtype": "float32"}, reproducible=True)
    with pytest.raises(UserError, match="started with --reproducible, and kernels was a and is b"):
        open_output(run=msgspec.structs.replace(RUN, fingerprint=other), resume=True)
    bits_differ = msgspec.structs.replace(other, reproducible=False)
    open_output(run=msgspec.structs.replace(RUN, fingerprint=bits_differ), resume=True)
    assert ids(out) == [1]
