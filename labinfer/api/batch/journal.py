"""The journal of a job: a file beside its output that says which input lines have their output line, and where that ends.

It begins with a header, a line of JSON, and has a record of 32 bytes for each output line, written after it. So whenever the
process dies, the output up to the end in the last whole record has exactly the lines that the records name; the next run cuts
off what follows and does it again. Both are in the system's page cache once written: a killed process loses neither, a machine
that loses its power may lose the last seconds of both.
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
"""Version of the header and the records."""
SUFFIX = ".journal"
MAKE_ROOM = "what was written before is complete: make room, then --resume"
DIGEST_BYTES = 8
FIELDS = struct.Struct(f"<QQ{DIGEST_BYTES}sI")
"""Number of the input line, bytes of the output up to the end of its output line, digest of the input line, whether it failed."""
CHECKSUM = struct.Struct("<I")
"""CRC-32 of the fields, which follows them."""
RECORD_BYTES = FIELDS.size + CHECKSUM.size


def line_digest(line: bytes) -> bytes:
    """Digest of an input line (BLAKE2b, RFC 7693)."""
    return hashlib.blake2b(line, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """An input line that has its output line."""

    number: int
    """Number of the input line, from 1."""
    end: int
    """Bytes of the output up to the end of the output line."""
    digest: bytes
    """See ``line_digest``."""
    failed: bool
    """Whether the output line says why there is no answer."""


class Journal:
    """The journal of an output file, open and locked: no other run can have it at the same time.

    Args:
        reads: whether an earlier run's records are read; else they are as good as not there.

    Raises:
        UserError: it cannot be opened, another run has it, or it is not a journal.
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
                f"--output {output}: another job is writing it; wait for it, or give another file"
            ) from None
        except OSError:
            pass  # a file system without locks
        if os.fstat(self._fd).st_nlink == 0:  # opened at the moment when the run before took its empty one away
            raise UserError(f"--output {output}: another job has just been refused; try again")
        self.header: dict[str, Any] | None
        """Options, input and model of the run that began the journal; None where there is none yet."""
        self.entries: list[JournalEntry]
        """In the order of the output."""
        self._header_bytes = 0
        try:
            self.header, self.entries = self._read() if reads else (None, [])
        except UserError:
            os.close(self._fd)
            raise

    def begin(self, header: dict[str, Any]) -> None:
        """Empty it of an earlier run's records."""
        self.header, self.entries = header, []
        os.ftruncate(self._fd, 0)
        line = _header_line(header)
        self._header_bytes = len(line)
        self._write(line)

    def add(self, entry: JournalEntry) -> None:
        """Record a line whose output line has been written.

        Raises:
            UserError: the record could not be written.
        """
        self._write(_record(entry))

    def replace(self, header: dict[str, Any], entries: list[JournalEntry]) -> None:
        """Put others in the place of all records, at once.

        Raises:
            OSError: they cannot be written; those that are there stay.
        """
        new = Path(self.path + ".new")
        new.unlink(missing_ok=True)  # of a run that died here
        line = _header_line(header)
        new.write_bytes(line + b"".join(map(_record, entries)))
        fd = os.open(new, os.O_RDWR | os.O_APPEND)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.replace(new, self.path)
        os.close(self._fd)
        self._fd, self._header_bytes, self.header, self.entries = fd, len(line), header, entries

    def cut(self) -> None:
        """Cut off what follows the last whole record."""
        os.ftruncate(self._fd, self._header_bytes + RECORD_BYTES * len(self.entries))

    def close(self) -> None:
        """Let another job have it; one that was never begun is taken away."""
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

    def _read(self) -> tuple[dict[str, Any] | None, list[JournalEntry]]:
        with open(self.path, "rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):  # empty, or broken off before anything was done
                return None, []
            try:
                header = json.loads(first)
                version = header["journal"]
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{self.path} is not a job's journal; --overwrite begins the job anew") from None
            if version != FORMAT:
                raise UserError(
                    f"{self.path} was begun by another version of LABInfer, whose record of the model is another one; go on with that "
                    "version, or --overwrite begins the job anew"
                )
            self._header_bytes = len(first)
            entries = []
            while len(record := file.read(RECORD_BYTES)) == RECORD_BYTES:
                fields = record[: FIELDS.size]
                if zlib.crc32(fields) != CHECKSUM.unpack(record[FIELDS.size :])[0]:
                    break
                number, end, digest, failed = FIELDS.unpack(fields)
                entries.append(JournalEntry(number=number, end=end, digest=digest, failed=bool(failed)))
            return header, entries


def _header_line(header: dict[str, Any]) -> bytes:
    return json.dumps({"journal": FORMAT} | header).encode() + b"\n"


def _record(entry: JournalEntry) -> bytes:
    fields = FIELDS.pack(entry.number, entry.end, entry.digest, entry.failed)
    return fields + CHECKSUM.pack(zlib.crc32(fields))
