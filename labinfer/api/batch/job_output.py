"""JobOutput: writes the output lines of a job. If the output is a file, a journal is kept, so that the job can be resumed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from labinfer.api.batch.journal import Journal, JournalEntry
from labinfer.api.batch.options import JobOptions
from labinfer.api.batch.recorded_job import RUN_KEY, RecordedRun
from labinfer.base.errors import UserError
from labinfer.launch.fingerprint import Fingerprint
from labinfer.observe.output_file import STANDARD, OutputFile
from labinfer.weights.identity import Identity, compare

logger = logging.getLogger(__name__)


class JobOutput:
    """The output of a job (a file with a journal, or standard output).

    Args:
        others: maps the option of each other file of the run to its path.
        given: values, besides the model, that the answers depend on: by kind (input, options), then by name; ``--resume`` refuses
            to continue if one differs.

    Raises:
        UserError: the output cannot be written, has answers of an earlier run that would be overwritten, or belongs to a job that
            cannot be resumed.
    """

    def __init__(self, job: JobOptions, others: dict[str, str], given: dict[str, dict[str, Any]]):
        self._path, self._others, self._given = job.output, others, given
        self._retry_errors = job.retry_errors
        self.digests: dict[int, bytes] = {}
        """Maps the number of each input line that has an output line to ``line_digest`` of the input line."""
        self.num_failed = 0
        """Number of input lines whose output line is an error."""
        is_file = job.output not in ("", STANDARD) and (not os.path.exists(job.output) or os.path.isfile(job.output))
        wants_more = job.resume or job.retry_errors
        if wants_more and not (is_file and job.input):
            raise UserError("--resume continues an earlier run: give its --input FILE and --output FILE")
        self._file = self._open()
        self._journal = Journal(job.output, reads=not job.overwrite) if is_file and job.input else None
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._resumes = wants_more and self._journal.header is not None
            if self._resumes:
                self._adopt_rewritten()
                self._check_given()
            elif is_file and not job.overwrite:
                self._check_empty(wants_more)
            on_error.pop_all()

    def begin(self, model: Identity, run: RecordedRun | None = None) -> None:
        """Begin the output: append to the file if the job is resumed, otherwise empty it.

        Args:
            run: record of the run, from which ``launch.py verify`` recomputes lines; None for a batch of a server,
                which cannot be verified.

        Raises:
            UserError: the job was begun with another model or, with ``--reproducible``, with another fingerprint.
        """
        if self._resumes:
            self._check_model(model)
            if run is not None:
                self._check_fingerprint(run.fingerprint)
            self._cut()
            if self._retry_errors:
                self._remove_failed()
            self.digests = {entry.number: entry.digest for entry in self._journal.entries}
            self.num_failed = sum(entry.failed for entry in self._journal.entries)
            return
        self._file.begin()
        if self._journal is not None:
            header = {"model": model, "rewritten": 0} | ({} if run is None else {RUN_KEY: run})
            self._journal.begin(self._given | msgspec.to_builtins(header))

    @property
    def is_journaled(self) -> bool:
        """Whether the job can be resumed."""
        return self._journal is not None

    @property
    def is_terminal(self) -> bool:
        return self._file.is_terminal

    def write_text(self, text: str) -> None:
        """Write text that is not an output line, such as the title of an answer."""
        self._file.write(text)

    def write(self, record: dict[str, Any], number: int, digest: bytes = b"", failed: bool = False) -> None:
        """Write the output line of input line ``number``, and its record in the journal.

        Raises:
            UserError: writing failed; the lines written before are complete.
        """
        self._file.write_json(record)
        if self._journal is not None:
            self._journal.add(JournalEntry(number=number, end=self._file.num_bytes(), digest=digest, failed=failed))

    def close(self) -> None:
        """Close the output file, and unlock the journal."""
        self._file.close()
        if self._journal is not None:
            self._journal.close()

    def _open(self) -> OutputFile:
        return OutputFile(self._path or STANDARD, "--output", self._others)

    def _check_empty(self, wants_more: bool) -> None:
        """Check that the output file is empty.

        Args:
            wants_more: whether the user gave ``--resume`` but the journal is missing; the error then says so.

        Raises:
            UserError: the output has answers of an earlier run.
        """
        if size := self._file.num_bytes():
            can_resume = self._journal is not None and self._journal.header is not None
            hint = "--resume continues it, " if can_resume else ""
            lacks = f" (its journal, {self._journal.path}, is missing)" if wants_more else ""
            raise UserError(
                f"--output {self._path} has {size} bytes of an earlier run; {hint}--overwrite starts over{lacks}"
            )

    def _check_given(self) -> None:
        header = self._journal.header
        for kind, values in self._given.items():
            _refuse_change(self._path, kind, header[kind], values)
        size, entries = self._file.num_bytes(), self._journal.entries
        while entries and entries[-1].end > size:  # after a power loss, the output may be shorter than the journal says
            entries.pop()

    def _check_model(self, model: Identity) -> None:
        """Check that ``model`` is the model of the earlier run.

        Raises:
            UserError: the job was begun with another model.
        """
        changes = compare(msgspec.convert(self._journal.header["model"], Identity), model)
        if changes.changed:
            raise UserError(
                f"--resume: {self._path} was started with another model: {changes.describe()} since; restore the "
                "old files, or use --overwrite to start over"
            )
        for path in changes.rewritten:
            logger.warning(
                "warning: %s was modified since the job started, but its header and samples of all its tensors "
                "are unchanged; treating it as the same file",
                path,
            )

    def _check_fingerprint(self, now: Fingerprint) -> None:
        """Check that a resumed job with --reproducible has the fingerprint that it began with.

        Raises:
            UserError: a part of the fingerprint differs, so that the bits of the answers would differ.
        """
        if not now.reproducible:
            return
        before = msgspec.convert(self._journal.header[RUN_KEY], RecordedRun).fingerprint
        for part, (old, new) in before.differences(now).items():
            raise UserError(
                f"--resume: {self._path} was started with --reproducible, and {part} was {old} and is {new}; resume it where these "
                "are equal, or use --overwrite to start over"
            )

    @property
    def _end(self) -> int:
        """Position in the output, in bytes, at which the last line that the journal records ends."""
        return self._journal.entries[-1].end if self._journal.entries else 0

    def _cut(self) -> None:
        """Truncate output and journal after the last line that is complete in both."""
        self._journal.cut()
        self._file.cut(self._end)

    def _rewritten(self, number: int) -> Path:
        return Path(f"{os.path.realpath(self._path)}.rewritten-{number}")

    def _remove_failed(self) -> None:
        """Rewrite output and journal without the lines that are errors. The new journal, which names the new output file, is put in
        place first. If the process dies before the old output file is replaced, the next run replaces it."""
        if not any(entry.failed for entry in self._journal.entries):
            return
        header, begin, end = dict(self._journal.header), 0, 0
        header["rewritten"] += 1
        new, kept = self._rewritten(header["rewritten"]), []
        try:
            with open(self._path, "rb") as old, open(new, "wb") as file:
                for entry in self._journal.entries:
                    line = old.read(entry.end - begin)
                    begin = entry.end
                    if not entry.failed:
                        file.write(line)
                        end += len(line)
                        kept.append(JournalEntry(number=entry.number, end=end, digest=entry.digest, failed=False))
            shutil.copymode(self._path, new)
            self._journal.replace(header, kept)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise UserError(f"cannot rewrite --output {self._path} without its errors: {error.strerror}") from None
        self._adopt_rewritten()

    def _adopt_rewritten(self) -> None:
        if (header := self._journal.header) is not None and (new := self._rewritten(header["rewritten"])).exists():
            os.replace(new, os.path.realpath(self._path))
            self._file = self._open()


def _refuse_change(output: str, kind: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume with options or an input that differ from those of the earlier run.

    Raises:
        UserError: a value differs; the message names the first one.
    """
    another = "other" if kind.endswith("s") else "another"
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old != new:
            raise UserError(
                f"--resume: {output} was started with {another} {kind}: {name} was {_shown(old)} and is "
                f"{_shown(new)}; give the old {kind}, or use --overwrite to start over"
            )


def _shown(value: Any) -> str:
    return "not there" if value is None else f"{value}"
