"""RecordedJob: output of an earlier job with --reproducible, and the files and options from which its lines can be recomputed."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from labinfer.api.batch.journal import SUFFIX, JournalEntry, line_digest, read_journal
from labinfer.api.batch.reader import JsonlReader, LongLine
from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.launch.fingerprint import Fingerprint
from labinfer.weights.identity import Identity

RUN_KEY = "run"
"""Key of the ``RecordedRun`` in the header of a job's journal."""
MAX_LINE_BYTES = 1 << 30
"""Maximum length of an input line in bytes; ``--max-line-size`` of the job is not recorded."""
MAX_REPORT_BYTES = 1 << 26


class RecordedRun(msgspec.Struct, frozen=True):
    """What a job's journal records of the run that began it, for ``launch.py verify``."""

    fingerprint: Fingerprint
    """Fingerprint of the answers, with the sampling defaults."""
    sampling: dict[str, Any]
    """Default sampling parameters of the input lines: fields of ``SamplingParams``."""
    input: str
    """Absolute path of the input file."""


@dataclass(frozen=True)
class RecordedLine:
    """An output line of a job, and the input line that it answers."""

    number: int
    """Number of the input line, from 1."""
    output_number: int
    """Number of the output line, from 1."""
    text: bytes
    """The input line."""
    record: dict[str, Any]
    """The output line."""


@dataclass(frozen=True)
class RecordedJob:
    """The files of an earlier job.

    Args:
        input, output: paths of the job's files.
        run: the run that began the job.
        model: identity of the model that answered.
        entries: journal entry of each output line.
    """

    input: str
    output: str
    run: RecordedRun
    model: Identity
    entries: list[JournalEntry]

    @classmethod
    def open(cls, path: str, input: str = "") -> RecordedJob:
        """Find the files of a job.

        Args:
            path: path of the job's output, or of its report.
            input: path of the job's input; if empty, the path in the journal.

        Raises:
            UserError: a file is missing, is not of a job, or the job did not run with ``--reproducible``.
        """
        output = path if os.path.exists(path + SUFFIX) else _reported_output(path)
        journal = output + SUFFIX
        try:
            header, entries, _ = read_journal(journal)
        except OSError as error:
            raise UserError(
                f"cannot read the job's journal {journal}: {error.strerror}; verify needs it beside the output"
            ) from None
        if header is None or "model" not in header:
            raise UserError(f"{journal} is not the journal of a job that has begun; run the job first")
        if RUN_KEY not in header:
            raise UserError(
                f"{output} was written by an earlier version of LABInfer, which records no fingerprint; run the job again"
            )
        try:
            run = msgspec.convert(header[RUN_KEY], RecordedRun)
            model = msgspec.convert(header["model"], Identity)
        except msgspec.ValidationError as error:
            raise UserError(f"{journal} is not the journal of a job of this version: {error}") from None
        if not run.fingerprint.reproducible:
            raise UserError(
                f"{output} was written without --reproducible, so its bits are not promised; run the job with it"
            )
        return cls(_find(input or run.input, "" if input else output, "--input"), output, run, model, entries)

    def sampling(self) -> SamplingParams:
        """Default sampling parameters of the input lines.

        Raises:
            UserError: the journal has sampling parameters that do not exist.
        """
        try:
            return msgspec.convert(self.run.sampling, SamplingParams)
        except msgspec.ValidationError as error:
            raise UserError(f"{self.output}{SUFFIX} has sampling parameters of another version: {error}") from None

    def choose(self, count: int, seed: int) -> list[RecordedLine]:
        """Choose answered output lines at random, and return them in the order of the input. Lines with errors are never chosen.

        Args:
            count: number of lines; all lines if there are fewer.
            seed: seed of the random choice.

        Raises:
            UserError: the output has no answered line, is truncated, or the input line of a chosen output line is not the one that
                the job answered.
        """
        records = self._read_output()
        numbers = [index for index, entry in enumerate(self.entries) if not entry.failed]
        if not numbers:
            raise UserError(f"{self.output} has no answered line; nothing can be verified")
        chosen = random.Random(seed).sample(numbers, min(count, len(numbers)))
        outputs = {self.entries[index].number: index for index in chosen}
        lines = []
        for number, text in self._read_input(outputs).items():
            index = outputs[number]
            record = _parse(records[index], f"{self.output}, line {index + 1}")
            lines.append(RecordedLine(number, index + 1, text, record))
        return lines

    def _read_output(self) -> list[bytes]:
        """Output lines, one for each journal entry.

        Raises:
            UserError: the file cannot be read, or has more or fewer lines than the journal has entries.
        """
        try:
            text = Path(self.output).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {self.output}: {error.strerror}") from None
        lines = text.split(b"\n")
        if lines.pop():
            raise UserError(f"the last line of {self.output} is truncated; continue the job with --resume")
        if len(lines) != len(self.entries):
            raise UserError(
                f"{self.output} has {len(lines)} lines, and its journal records {len(self.entries)}; continue the job with --resume"
            )
        return lines

    def _read_input(self, indices: Mapping[int, int]) -> dict[int, bytes]:
        """Input lines by number.

        Args:
            indices: indices of the journal entries of the lines, by line number.

        Raises:
            UserError: the file cannot be read, or a line is not the one that the job answered.
        """
        reader = JsonlReader(self.input, MAX_LINE_BYTES)
        try:
            lines = {number: text for number, text in filter(None, reader) if number in indices}
        finally:
            reader.close()
        for number, index in sorted(indices.items()):
            text = lines.get(number)
            if text is None or isinstance(text, LongLine) or line_digest(text) != self.entries[index].digest:
                raise UserError(
                    f"line {number} of {self.input} is not the line that {self.output} answers; restore the job's input, or give it "
                    "with --input"
                )
        return lines


def _reported_output(path: str) -> str:
    """Path of the output file that is named in a job's report ``path``.

    Raises:
        UserError: ``path`` is not a report of a job with an output file.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_REPORT_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        report = None
    if not isinstance(report, dict) or not isinstance(report.get("output"), str) or "fingerprint" not in report:
        raise UserError(
            f"{path} is neither the output of a job ({path}{SUFFIX} is missing) nor the report of one; give the file of --output or of "
            "--report"
        )
    if not report["output"]:
        raise UserError(
            f"{path} is the report of a run without an output file; run the job with --input FILE --output FILE"
        )
    return _find(report["output"], path, "the output file")


def _find(recorded: str, near: str, what: str) -> str:
    """Path of a file of the job: the path ``recorded`` in the journal or report, or else a file of that name next to ``near``, as
    the files may have been moved together. ``what`` names the file in the error.

    Raises:
        UserError: the file is in neither place.
    """
    if os.path.isfile(recorded):
        return recorded
    beside = os.path.join(os.path.dirname(near), os.path.basename(recorded))
    if near and os.path.isfile(beside):
        return beside
    raise UserError(
        f"{what} {recorded} does not exist; restore it" + (", or give --input FILE" if what == "--input" else "")
    )


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a JSON object; restore the job's output")
    return record
