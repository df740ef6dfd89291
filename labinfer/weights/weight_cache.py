"""WeightCache: a folder of files with packed weights, one for each slice of a checkpoint in one form; no torch.

A file has the data, whose tensors begin at multiples of 64 bytes, then a header, and at the end where that is and its digest: what
was cut short has no end. The header says what the weights were made of, which a reader compares with what it asks for. A file appears
under its name when it is complete. Whoever uses one touches it, and those that were not used for the longest time make room for new ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import msgspec

from labinfer.base.plugins import PLUGINS
from labinfer.native import compiler
from labinfer.native.cache_file import UNFINISHED, Damaged, digest, is_at, open_own, sync_folder, try_lock
from labinfer.weights.model_files import open_model

GIB = 1 << 30
SUFFIX = ".weights"
MAGIC = b"labinfer weights 2"
TRAILER = struct.Struct("<QQ32s18s")
"""Bytes of data, bytes of the header behind them, digest of the header, ``MAGIC``."""
ALIGNMENT = 64
PIECE = 4 << 20
"""Bytes of data that have a checksum; a multiple of the large pages in which systems keep files that are written so."""
FREE_FRACTION = 0.1
"""Part of a disk that is left free."""
PACKAGE = Path(__file__).parent.parent
SOURCES = ("functions", "models", "native", "weights")
"""Folders with the code that decides how packed weights look."""
CODE = (".py", ".cpp", ".h")
NETWORKS = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "ceph",
    "gpfs",
    "beegfs",
    "fuse",
    "9p",
    "afs",
    "gluster",
    "pvfs",
    "orangefs",
)
"""Beginnings of the names of file systems whose files other machines may take away while they are mapped."""


class CachedTensor(msgspec.Struct, frozen=True):
    """A tensor's place among the data."""

    position: int
    dtype: str
    shape: list[int]


class WeightHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a file."""

    model: str
    """Directory of the checkpoint."""
    checkpoint: str
    """Digest of the checkpoint's files."""
    slice: str
    """The part of it and its form, for people."""
    slices: str
    """Digest of the slices of the modules."""
    circumstances: str
    """Digest of all else that packed weights depend on beside their slices and the code: provider, rounding, group size."""
    options: str
    """Digest of the options of the start that wrote it, of which there is one file for each slice."""
    code: str
    """Digest of the code that wrote it."""
    modules: dict[str, dict[str, CachedTensor | str | int | float | bool | None]]
    """State of each module."""
    checksums: list[int]
    """One for each ``PIECE`` of the data."""

    def compare(self, checkpoint: str, code: str, circumstances: str, slices: str) -> None:
        """Compare what the weights were made of with what a start asks for.

        Raises:
            Damaged: it is something else.
        """
        asked = {"checkpoint": checkpoint, "code": code, "circumstances": circumstances, "slices": slices}
        different = [name for name, value in asked.items() if getattr(self, name) != value]
        if different:
            raise Damaged(f"it was made of other {', '.join(different)}: {self.slice} of {self.model}")


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """A file of the cache."""

    path: Path
    size: int
    last_use: float
    """Seconds since the epoch."""


class NoRoom(Exception):
    """Weights are not to be written; the text says why."""


class WeightCache:
    """The files of a folder, which need not be there.

    Args:
        limit: bytes that all files may take.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self._limit = folder, limit

    @cached_property
    def code(self) -> str:
        """Digest of the code, which does not change in a run."""
        return code_digest()

    @classmethod
    def from_home(cls, gib: float) -> WeightCache | None:
        """This user's cache; None where it may take nothing, or there is no home directory."""
        try:
            return cls(compiler.default_cache(), int(gib * GIB)) if gib else None
        except compiler.NoCompiler:
            return None

    def files(self) -> list[WeightFile]:
        """All that are complete, the one that was used last first."""
        files = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process has removed it
                status = path.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    files.append(WeightFile(path=path, size=status.st_size, last_use=status.st_mtime))
        return sorted(files, key=lambda file: -file.last_use)

    def path(self, checkpoint: str, slice: str) -> Path:
        """The file for a slice, by digests of the checkpoint and of all else that its contents depend on."""
        return self.folder / f"{checkpoint}-{slice}{SUFFIX}"

    def knows(self, checkpoint: str) -> bool:
        """Whether there are weights of a checkpoint, which was checked then by the code as it is."""
        return bool(self._headers(checkpoint))

    def started_so(self, checkpoint: str, options: str) -> list[Path]:
        """Files that starts with these options, and the code as it is, wrote for a checkpoint."""
        return [path for path, header in self._headers(checkpoint).items() if header.options == options]

    def _headers(self, checkpoint: str) -> dict[Path, WeightHeader]:
        """Headers of the files that the code as it is wrote for a checkpoint."""
        paths = (file.path for file in self.files() if file.path.name.startswith(checkpoint))
        headers = ((path, try_header(path)) for path in paths)
        asked = (checkpoint, self.code)
        return {path: header for path, header in headers if header and (header.checkpoint, header.code) == asked}

    def remove_superseded(self, path: Path, header: WeightHeader) -> None:
        """Remove what was written for the same slice by a start with the same options, but of another checkpoint or by other code."""
        for file in self.files():
            other = try_header(file.path) if file.path != path else None
            if other and (other.model, other.slice, other.options) == (header.model, header.slice, header.options):
                file.path.unlink(missing_ok=True)

    def mapped_bytes(self, maps: Path = Path("/proc/self/maps")) -> int:
        """Bytes of files that this process has mapped."""
        total, begin = 0, f"{self.folder.resolve()}/"
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                address, *_, path = line.split(maxsplit=5)
                if path.startswith(begin) and SUFFIX in path:
                    first, last = (int(part, 16) for part in address.split("-"))
                    total += last - first
        return total

    def make_room(self, num_bytes: int) -> None:
        """Remove files until one of this size may be written.

        Raises:
            NoRoom: it may not.
        """
        if num_bytes > self._limit:
            raise NoRoom(f"they take {num_bytes / GIB:.1f} GiB, and --weight-cache-size is {self._limit / GIB:g}")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if kind := network_file_system(self.folder):
            raise NoRoom(f"{self.folder} is on a network ({kind}), whose files are not mapped")
        self._remove_unfinished()
        files = self.files()
        while files and sum(file.size for file in files) + num_bytes > self._limit:
            files.pop().path.unlink(missing_ok=True)
        disk = shutil.disk_usage(self.folder)
        if disk.free - num_bytes < FREE_FRACTION * disk.total:
            raise NoRoom(
                f"{self.folder} has {disk.free / GIB:.1f} GiB free, and a tenth of the disk is not to be filled"
            )

    def clean(self) -> int:
        """Remove all files but those that are being written. Returns their bytes.

        Raises:
            OSError: one cannot be removed.
        """
        self._remove_unfinished()
        files = self.files()
        for file in files:
            file.path.unlink(missing_ok=True)
        return sum(file.size for file in files)

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[BinaryIO | None]:
        """A new file, which takes this path when the block ends without an error; None where another process is writing it.

        Raises:
            OSError: it cannot be written.
        """
        unfinished = path.with_suffix(UNFINISHED)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(unfinished, flags, 0o600), "ab", buffering=0) as file:
            if not try_lock(file) or not is_at(file, unfinished):  # another process is writing it, or has just done so
                yield None
                return
            try:
                os.fchmod(file.fileno(), 0o600)
                file.truncate(0)  # what a killed process had written
                yield file
                os.fsync(file.fileno())  # else the name might be on the disk before what it names
                os.replace(unfinished, path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
        sync_folder(self.folder)

    def _remove_unfinished(self) -> None:
        """Remove what killed processes were writing, and what stands in the place of such a file."""
        for path in self.folder.glob(f"*{UNFINISHED}"):
            with contextlib.suppress(OSError):
                try:
                    with open_own(path) as file:
                        is_left = try_lock(file)
                except Damaged:
                    is_left = True
                if is_left:
                    path.unlink(missing_ok=True)


def checkpoint_digest(directory: Path) -> str:
    """Digest of the files of a checkpoint that weights depend on, by what the system says of them.

    Inode and time of the last change tell a file from one of the same name, size and date: neither copying nor ``touch`` can set
    them. Reading a checkpoint to know it would take as long as loading it.

    Raises:
        OSError: one is not there.
        UserError: there are none.
    """
    configs = directory.glob("*.json") if directory.is_dir() else ()
    paths = sorted([*configs, *open_model(directory).weight_files()])
    return digest([(path.name, *_identity(path)) for path in paths])


def code_digest() -> str:
    """Digest of the code that decides how packed weights look: of its files, by what the system says of them, and of plugins."""
    files = []
    for source in SOURCES:
        for folder, _, names in os.walk(PACKAGE / source):
            files += [f"{folder}/{name}" for name in names if name.endswith(CODE)]
    statuses = {path.removeprefix(str(PACKAGE)): os.stat(path) for path in sorted(files)}
    own = [(path, status.st_size, status.st_mtime_ns) for path, status in statuses.items()]
    return digest(own, PLUGINS.computing_code())


def _identity(path: Path) -> Sequence[int]:
    """Size, time of the last writing, of the last change of any kind, and inode."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def read_header(file: BinaryIO) -> tuple[WeightHeader, int]:
    """The header of an open file, and the bytes of its data.

    Raises:
        Damaged: it has no such header.
        OSError: it cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    if size < TRAILER.size:
        raise Damaged(f"it ends after {size} bytes")
    data_bytes, header_bytes, header_digest, magic = TRAILER.unpack(
        os.pread(file.fileno(), TRAILER.size, size - TRAILER.size)
    )
    if magic != MAGIC or data_bytes + header_bytes + TRAILER.size != size:
        raise Damaged(f"it has no end after {size} bytes")
    header = os.pread(file.fileno(), header_bytes, data_bytes)
    if hashlib.blake2b(header, digest_size=32).digest() != header_digest:
        raise Damaged("its header has changed")
    try:
        return msgspec.msgpack.decode(header, type=WeightHeader), data_bytes
    except msgspec.DecodeError as error:
        raise Damaged(f"its header is of another version ({error})") from None


def try_header(path: Path) -> WeightHeader | None:
    """The header of a file; None where it has none."""
    try:
        with open_own(path) as file:
            return read_header(file)[0]
    except (OSError, Damaged):
        return None


def encode_header(header: WeightHeader, data_bytes: int) -> bytes:
    """The bytes behind the data of a file."""
    encoded = msgspec.msgpack.encode(header)
    return encoded + TRAILER.pack(data_bytes, len(encoded), hashlib.blake2b(encoded, digest_size=32).digest(), MAGIC)


def network_file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that a folder is on, if it is one of ``NETWORKS``; else empty."""
    try:
        lines = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    place, kinds = str(folder.resolve()), {}
    for _, point, kind, *_ in lines:
        point = point.replace("\\040", " ")
        if place == point or place.startswith(point.rstrip("/") + "/"):
            kinds[len(point)] = kind  # the last of several mounts on one point is the one that is seen
    kind = kinds[max(kinds)] if kinds else ""
    return kind if kind.startswith(NETWORKS) else ""
