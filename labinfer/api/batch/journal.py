"""Journal of a job: a file next to its output that records which input lines have an output line, and at which position each output
line ends.

The journal has a header (a line of JSON) and a record of 32 bytes per output line, written after the line. If the process dies, the
output up to the position in the last complete record consists of exactly the recorded lines. The next run truncates the output
there, and computes the other lines again. Written data are in the operating system's page cache: a killed process loses no data; a
power failure may lose the last seconds of output and journal.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError

FORMAT = 2
"""Version of the journal's format."""
SUFFIX = ".journal"
MAKE_ROOM = "results written so far are complete: free some disk space, then use --resume"
DIGEST_BYTES = 8
FIELDS = struct.Struct(f"<QQ{DIGEST_BYTES}sI")
"""Fields of a record: number of the input line, position in bytes at which the output line ends, digest of the input line, and
whether the output line is an error."""
CHECKSUM = struct.Struct("<I")
"""CRC-32 checksum of a record's fields, stored after them."""
RECORD_BYTES = FIELDS.size + CHECKSUM.size


def line_digest(line: bytes) -> bytes:
    """Digest of an input line (BLAKE2b, RFC 7693)."""
    return hashlib.blake2b(line, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """A record of the journal: an input line that has an output line."""

    number: int
    """Number of the input line, from 1."""
    end: int
    """Position in the output at which the line's output ends, in bytes."""
    digest: bytes
    """``line_digest`` of the input line."""
    failed: bool
    """Whether the output line is an error record."""


class Journal:
    """The open and locked journal of an output file.

    Args:
        reads: whether to read the records of an earlier run; if not, the records are ignored.

    Raises:
        UserError: the journal cannot be opened, is locked by another run, or is not a journal.
    """

    def __init__(self, output: str, reads: bool = True):
        self.path = output + SUFFIX
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"cannot write the job's journal {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--output {output}: another job is writing to it; wait for that job, or give another file"
            ) from None
        except OSError:
            pass  # the file system has no locks
        if os.fstat(self._fd).st_nlink == 0:  # another run removed the file after it was opened here
            raise UserError(f"--output {output}: another job was just checking it; try again")
        self.header: dict[str, Any] | None
        """Options, input and model of the run that began the journal; None if the journal is empty."""
        self.entries: list[JournalEntry]
        """Entries in output order."""
        try:
            self.header, self.entries, self._header_bytes = read_journal(self.path) if reads else (None, [], 0)
        except UserError:
            os.close(self._fd)
            raise

    def begin(self, header: dict[str, Any]) -> None:
        """Replace the journal's content by a header without records."""
        self.header, self.entries = header, []
        os.ftruncate(self._fd, 0)
        line = _header_line(header)
        self._header_bytes = len(line)
        self._write(line)

    def add(self, entry: JournalEntry) -> None:
        """Append the record of a written output line.

        Raises:
            UserError: the record could not be written.
        """
        self._write(_record(entry))

    def replace(self, header: dict[str, Any], entries: list[JournalEntry]) -> None:
        """Replace header and records atomically.

        Raises:
            OSError: writing failed; the old content remains.
        """
        new = Path(self.path + ".new")
        new.unlink(missing_ok=True)  # left by a run that died before it renamed the file
        line = _header_line(header)
        new.write_bytes(line + b"".join(map(_record, entries)))
        fd = os.open(new, os.O_RDWR | os.O_APPEND)
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.replace(new, self.path)
        os.close(self._fd)
        self._fd, self._header_bytes, self.header, self.entries = fd, len(line), header, entries

    def cut(self) -> None:
        """Truncate the file after the last complete record."""
        os.ftruncate(self._fd, self._header_bytes + RECORD_BYTES * len(self.entries))

    def close(self) -> None:
        """Unlock and close the journal. An empty journal is removed."""
        if os.fstat(self._fd).st_size == 0:
            Path(self.path).unlink(missing_ok=True)
        os.close(self._fd)

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise UserError(f"cannot write the job's journal {self.path}: {error.strerror}; {MAKE_ROOM}") from None
        if written < len(data):
            raise UserError(f"cannot write the job's journal {self.path}: the disk is full; {MAKE_ROOM}")


def read_journal(path: str) -> tuple[dict[str, Any] | None, list[JournalEntry], int]:
    """Header, entries, and length of the header in bytes, of a journal file; (None, [], 0) if the header is missing or truncated.

    Raises:
        UserError: the file is not a journal of this version.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        first = file.readline()
        if not first.endswith(b"\n"):  # the file is empty, or was truncated before any line was answered
            return None, [], 0
        try:
            header = json.loads(first)
            version = header["journal"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not a job's journal; use --overwrite to start over") from None
        if version != FORMAT:
            raise UserError(
                f"{path} was started by another version of LABInfer, which identifies models differently; "
                "continue with that version, or use --overwrite to start over"
            )
        entries = []
        while len(record := file.read(RECORD_BYTES)) == RECORD_BYTES:
            fields = record[: FIELDS.size]
            if zlib.crc32(fields) != CHECKSUM.unpack(record[FIELDS.size :])[0]:
                break
            number, end, digest, failed = FIELDS.unpack(fields)
            entries.append(JournalEntry(number=number, end=end, digest=digest, failed=bool(failed)))
        return header, entries, len(first)


def _header_line(header: dict[str, Any]) -> bytes:
    return json.dumps({"journal": FORMAT} | header).encode() + b"\n"


def _record(entry: JournalEntry) -> bytes:
    fields = FIELDS.pack(entry.number, entry.end, entry.digest, entry.failed)
    return fields + CHECKSUM.pack(zlib.crc32(fields))
