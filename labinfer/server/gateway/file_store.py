"""FileStore: files and batches of all callers, in a folder that outlives the server.

``files/ID`` is the content of a file, ``files/ID.json`` the file's metadata, and ``batches/ID.json`` a batch. JSON files are
replaced atomically, so that a crash leaves the previous version. Paths contain generated ids only, never text from a request.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from labinfer.base.errors import UserError
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.files import Batch, FileObject
from labinfer.server.gateway.options import MIB, ServerOptions

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
MAX_FILES = 10_000
"""Maximum number of files per caller."""
UPLOAD_NAME, FILE_NAME = re.compile("[0-9a-f]{16}"), re.compile("file-[0-9a-f]{24}")
ANSWERS_NAME = re.compile(r"(batch_[0-9a-f]{24})\.answers.*")
"""Pattern of the names of a batch's answer file and its journal. Only files with such names are removed from the folder."""
POLL_SECONDS = 0.1
"""Seconds between two attempts to lock a folder that another server has locked."""


class StoredFile(msgspec.Struct, frozen=True):
    """Metadata of a stored file, and its owner."""

    owner: str
    file: FileObject

    @property
    def created_at(self) -> int:
        return self.file.created_at


class StoredBatch(msgspec.Struct, frozen=True):
    """State of a stored batch, and its owner."""

    owner: str
    batch: Batch

    @property
    def created_at(self) -> int:
        return self.batch.created_at


Record = TypeVar("Record", StoredFile, StoredBatch)


def lock_folder(folder: Path, seconds: float = 0.0) -> int:
    """Create and lock the folder of ``--files-dir``; return the file descriptor that holds the lock until it is closed.

    Args:
        seconds: seconds to wait until another server releases its lock.

    Raises:
        UserError: the folder cannot be used, a subfolder belongs to another user, or another server holds the lock.
    """
    end = time.monotonic() + seconds
    try:
        for path in (folder, *(folder / name for name in ("files", "batches", "uploads"))):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
            if path != folder and (owners := {status.st_uid, path.lstat().st_uid} - {os.geteuid(), 0}):
                raise UserError(
                    f"--files-dir {folder}: {path} belongs to user {owners.pop()}, who could read and change its "
                    "files; choose another directory"
                )
            is_shared = status.st_mode & stat.S_ISVTX  # such as /tmp, which others need; its subfolders are private
            if status.st_uid == os.geteuid() and not is_shared:  # a subfolder made by hand may be readable by all
                path.chmod(0o700)
        with contextlib.ExitStack() as on_failure:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            on_failure.callback(os.close, lock)
            is_told = False
            while not _try_lock(lock):
                if time.monotonic() > end:
                    raise UserError(f"--files-dir {folder}: another server uses it; give each server its own directory")
                if not is_told:
                    logger.warning(
                        "--files-dir %s: another server uses it; waiting up to %g s for its exit", folder, seconds
                    )
                    is_told = True
                time.sleep(POLL_SECONDS)
            on_failure.pop_all()
    except FileExistsError:
        raise UserError(f"--files-dir {folder} cannot be used: Not a directory") from None
    except OSError as error:
        raise UserError(f"--files-dir {folder} cannot be used: {error.strerror}") from None
    return lock


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FileStore:
    """Files and batches in the folder of ``--files-dir``.

    Args:
        now: returns seconds since 1970.

    Raises:
        UserError: the folder cannot be used, or another server has locked it.
    """

    def __init__(self, options: ServerOptions, now: Callable[[], float]):
        self._folder, self._now = Path(options.files_dir), now
        self.max_file_bytes, self._max_bytes = options.max_file_size * MIB, options.max_files_size * MIB
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, StoredBatch] = {}
        self._num_bytes: Counter[str] = Counter()  # bytes of each owner's files, with uploads in progress
        self._lock = lock_folder(self._folder)
        try:
            self.secret = self._load_secret()
            """Secret from which owner ids are derived; stored, so that owner ids survive a restart."""
            for path in sorted((self._folder / "files").glob("*.json")):
                if path.with_suffix("").exists():
                    self._files[path.stem] = stored = _load(path, StoredFile)
                    self._num_bytes[stored.owner] += stored.file.bytes
            for path in sorted((self._folder / "batches").glob("*.json")):
                self._batches[path.stem] = _load(path, StoredBatch)
            self._remove_orphans()
        except OSError as error:
            raise UserError(f"--files-dir {self._folder} cannot be used: {error.strerror}") from None

    # Methods for files.

    def begin(self, owner: str) -> Upload:
        """Begin an upload of a file of ``owner``.

        Raises:
            ApiError: the owner has too many files.
        """
        if len(self.files(owner)) >= MAX_FILES:
            raise api_errors.bad_request(f"file: the limit of {MAX_FILES} files is reached; delete some")
        return Upload(self, owner)

    def files(self, owner: str) -> list[FileObject]:
        """Files of ``owner``, oldest first."""
        return [stored.file for stored in _owned_records(self._files, owner)]

    def file(self, owner: str, id: str, param: str = "id") -> FileObject:
        """Return the file ``id`` of ``owner``.

        Args:
            param: name of the field or parameter of the request that has the id, for errors.

        Raises:
            ApiError: the owner has no such file.
        """
        return _owned_record(self._files, owner, id, "file", param).file

    def content(self, file: FileObject) -> Path:
        """Path of a file's content."""
        return self._folder / "files" / file.id

    def delete_file(self, owner: str, id: str) -> None:
        """Delete the file ``id`` of ``owner``.

        Raises:
            ApiError: the owner has no such file.
        """
        file = self.file(owner, id)
        path = self.content(file)
        del self._files[id]
        self.release(owner, file.bytes)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    # Methods for batches.

    def batches(self, owner: str) -> list[Batch]:
        """Batches of ``owner``, oldest first."""
        return [stored.batch for stored in _owned_records(self._batches, owner)]

    def batch(self, owner: str, id: str) -> Batch:
        """Return the batch ``id`` of ``owner``.

        Raises:
            ApiError: the owner has no such batch.
        """
        return _owned_record(self._batches, owner, id, "batch").batch

    def all_batches(self) -> list[StoredBatch]:
        """All stored batches, of all owners."""
        return list(self._batches.values())

    def put_batch(self, owner: str, batch: Batch, is_lasting: bool = True) -> None:
        """Store the state of a batch: in memory, and on disk if ``is_lasting``."""
        self._batches[batch.id] = stored = StoredBatch(owner, batch)
        if is_lasting:
            self._write(self._folder / "batches" / f"{batch.id}.json", stored)

    def forget_batch(self, batch: Batch) -> None:
        """Remove a batch from the store; its input and result files stay."""
        del self._batches[batch.id]
        (self._folder / "batches" / f"{batch.id}.json").unlink(missing_ok=True)

    def answers(self, batch: Batch) -> Path:
        """Path of the file with a batch's answers; its journal is next to it. File and journal exist until the batch is done."""
        return self._folder / "batches" / f"{batch.id}.answers"

    def remove_answers(self, batch: Batch) -> None:
        """Remove the file with a batch's answers, after they were split into result files."""
        for path in (self._folder / "batches").glob(f"{batch.id}.answers*"):
            path.unlink()

    def remove_results(self, owner: str, filename: str) -> None:
        """Remove result files of ``owner`` called ``filename``, if there are any."""
        for file in self.files(owner):
            if (file.filename, file.purpose) == (filename, "batch_output"):
                self.delete_file(owner, file.id)

    # Methods for uploads.

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Reserve space for ``num_bytes`` bytes that ``owner`` is about to write, within the limits of ``--max-files-size``.

        Raises:
            ApiError: there is no space for the bytes.
        """
        self.check_room(owner, num_bytes)
        self._num_bytes[owner] += num_bytes

    def check_room(self, owner: str, num_bytes: int = 0) -> None:
        """Check that ``owner`` may store ``num_bytes`` bytes more. ``--max-files-size`` limits each owner, and all owners together.

        Raises:
            ApiError: a limit is or would be exceeded.
        """
        own, used = self._num_bytes[owner] + num_bytes, self._num_bytes.total() + num_bytes
        if own > self._max_bytes // 2 or used > self._max_bytes:
            raise api_errors.bad_request(
                f"file storage is full: this caller's files would have {own} bytes, and all callers' {used} "
                "(limit: --max-files-size, half of it per caller); delete files that are no longer needed"
            )

    def release(self, owner: str, num_bytes: int) -> None:
        """Release ``num_bytes`` bytes that were reserved and are not used."""
        self._num_bytes[owner] -= num_bytes

    def new_upload_path(self) -> Path:
        """New path for the temporary file of an upload that has just begun."""
        return self._folder / "uploads" / secrets.token_hex(8)

    def adopt(self, owner: str, path: Path, filename: str, purpose: str) -> FileObject:
        """Move the complete file ``path`` into the store, as a file of ``owner``. Ignores the size limits, so that a batch never
        loses its results."""
        file = FileObject(
            id=f"file-{secrets.token_hex(12)}",
            bytes=path.stat().st_size,
            created_at=int(self._now()),
            filename=filename,
            purpose=purpose,
        )
        os.replace(path, self.content(file))
        self._num_bytes[owner] += file.bytes
        self._files[file.id] = stored = StoredFile(owner, file)
        self._write(self.content(file).with_suffix(".json"), stored)
        return file

    def _load_secret(self) -> bytes:
        path = self._folder / "secret"
        if not path.exists():
            new = self.new_upload_path()
            new.write_bytes(secrets.token_bytes(SECRET_BYTES))
            new.chmod(0o600)
            os.replace(new, path)
        return path.read_bytes()

    def _remove_orphans(self) -> None:
        """Remove files that a crashed server has left: incomplete uploads, files without metadata, and answers of ended batches."""
        for path in (self._folder / "uploads").iterdir():
            if UPLOAD_NAME.fullmatch(path.name):
                path.unlink()
        for path in (self._folder / "files").iterdir():
            if FILE_NAME.fullmatch(path.name) and path.name not in self._files:
                path.unlink()
        for path in (self._folder / "batches").iterdir():
            match = ANSWERS_NAME.fullmatch(path.name)
            if match and ((stored := self._batches.get(match[1])) is None or not stored.batch.is_open):
                path.unlink()

    def _write(self, path: Path, record: msgspec.Struct) -> None:
        new = self.new_upload_path()
        new.write_bytes(msgspec.json.encode(record))
        os.replace(new, path)


class Upload:
    """A file that a client is uploading; the caller must call ``close``."""

    def __init__(self, store: FileStore, owner: str):
        self._store, self._owner = store, owner
        self._path = store.new_upload_path()
        self._file = open(self._path, "xb")  # noqa: SIM115 - ``close`` closes the file
        self._num_bytes = 0  # bytes reserved for this upload

    def write(self, data: bytes) -> None:
        """Append ``data`` to the file.

        Raises:
            ApiError: the file is too long, or there is no space for it.
        """
        if self._num_bytes + len(data) > self._store.max_file_bytes:
            raise api_errors.too_large(self._store.max_file_bytes)
        self._store.reserve(self._owner, len(data))
        self._num_bytes += len(data)
        self._file.write(data)

    def finish(self, filename: str, purpose: str) -> FileObject:
        """Move the file, whose upload is complete, into the store."""
        self._close_file()
        return self._store.adopt(self._owner, self._path, filename, purpose)

    def close(self) -> None:
        """Remove the temporary file, unless ``finish`` has moved it into the store."""
        self._close_file()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _close_file(self) -> None:
        self._file.close()
        self._store.release(self._owner, self._num_bytes)
        self._num_bytes = 0


def _owned_records(records: Mapping[str, Record], owner: str) -> list[Record]:
    """Records (files or batches) of ``owner``, oldest first."""
    own = (record for record in records.values() if record.owner == owner)
    return sorted(own, key=lambda record: record.created_at)


def _owned_record(records: Mapping[str, Record], owner: str, id: str, kind: str, param: str = "id") -> Record:
    """Return the record (file or batch) ``id`` of ``owner``.

    Raises:
        ApiError: the owner has no such record.
    """
    record = records.get(id)
    if record is None or record.owner != owner:
        raise api_errors.not_found_object(kind, id, param)
    return record


def _load(path: Path, kind: type[Record]) -> Record:
    """Read a record (file or batch) from its JSON file.

    Raises:
        UserError: the file is not in this server's format.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise UserError(f"--files-dir: {path} cannot be read: {error}; move it away") from None
