"""WeightCache: a folder of files with packed weights, one for each rank's slice of a checkpoint and way of packing it. Does not
import torch.

A file contains the data (tensors aligned to 64 bytes), a header, and a trailer with the header's position and digest, so a
truncated file has no trailer. The header identifies the checkpoint and the packing; readers compare both with what they need. A
file is renamed to its final name when it is complete. A reader sets the modification time of a file; the least recently used files
are evicted.
"""

from __future__ import annotations

import contextlib
import fcntl
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
"""Size of the data in bytes, size of the header in bytes, digest of the header, ``MAGIC``."""
ALIGNMENT = 64
PIECE = 4 << 20
"""Bytes of data that share a checksum and are written at a time. It is a multiple of the huge page size, so that the
page cache can hold the file in huge pages."""
FREE_FRACTION = 0.1
FREE_BYTES = 10 * GIB
"""The cache leaves ``FREE_FRACTION`` of a disk free, at most ``FREE_BYTES``."""
PACKAGE = Path(__file__).parent.parent
SOURCES = ("functions", "models", "native", "weights")
"""Folders with the code that determines how weights are packed."""
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
"""Prefixes of types of network file systems, on which other machines may remove files while they are mapped."""


class CachedTensor(msgspec.Struct, frozen=True):
    """Position, dtype and shape of a tensor in the data part of a cache file."""

    position: int
    dtype: str
    shape: list[int]


class WeightHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a cache file."""

    model: str
    """Directory of the checkpoint."""
    checkpoint: str
    """Digest of the checkpoint's files."""
    slice: str
    """Text for users: the part of the checkpoint that the file has, and the dtype and quantization of its weights."""
    slices: str
    """Digest that identifies the parts of the checkpoint that the modules hold."""
    settings: str
    """Digest of the build and settings that packed weights depend on: version, kernel providers, rounding, quantization
    group size."""
    options: str
    """Digest of the options of the launch that wrote the file. Launches with equal options use one file per slice."""
    code: str
    """Digest of the packing code that wrote the file."""
    modules: dict[str, dict[str, CachedTensor | str | int | float | bool | None]]
    """State of each module, by its path in the model: tensors and plain values."""
    checksums: list[int]
    """Checksum of each ``PIECE`` of the data."""

    def compare(self, checkpoint: str, code: str, settings: str, slices: str) -> None:
        """Check that the packed weights were made for the digests in the arguments, those of the current launch.

        Raises:
            Damaged: a digest differs.
        """
        asked = {"checkpoint": checkpoint, "code": code, "settings": settings, "slices": slices}
        different = [name for name, value in asked.items() if getattr(self, name) != value]
        if different:
            raise Damaged(f"it was made from other {', '.join(different)}: {self.slice} of {self.model}")


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """Path, size and last use of a file in the cache."""

    path: Path
    size: int
    last_use: float
    """Modification time in seconds since the epoch."""


class NoRoom(Exception):
    """Packed weights must not be written to the cache; the message says why."""


class WeightCache:
    """Cache files in a folder, which need not exist.

    Args:
        limit: maximum size of all files in bytes.
        free_bytes: maximum of the bytes that the cache leaves free on the disk.
    """

    def __init__(self, folder: Path, limit: int, free_bytes: int = FREE_BYTES):
        self.folder, self._limit, self._free_bytes = folder, limit, free_bytes

    @cached_property
    def code(self) -> str:
        """Digest of the packing code (see ``code_digest``), constant during a run."""
        return code_digest()

    @classmethod
    def from_home(cls, gib: float) -> WeightCache | None:
        """This user's cache; None if its size limit is 0 or the user has no home directory."""
        try:
            return cls(compiler.default_cache(), int(gib * GIB)) if gib else None
        except compiler.NoCompiler:
            return None

    def files(self) -> list[WeightFile]:
        """All complete files, most recently used first."""
        files = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process has removed it
                status = path.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    files.append(WeightFile(path=path, size=status.st_size, last_use=status.st_mtime))
        return sorted(files, key=lambda file: -file.last_use)

    def path(self, checkpoint: str, slice: str) -> Path:
        """Path of the file for a slice. ``slice`` is a digest of everything that its contents depend on, except the checkpoint."""
        return self.folder / f"{checkpoint}-{slice}{SUFFIX}"

    def knows(self, checkpoint: str) -> bool:
        """Whether the cache has packed weights of a checkpoint, written by this version of the packing code. They prove that the checkpoint
        passed ``check_checkpoint``."""
        return bool(self._headers(checkpoint))

    def written_with(self, checkpoint: str, options: str) -> list[Path]:
        """Cache files of a checkpoint, written by this version of the packing code in a launch whose options have the digest
        ``options``."""
        return [path for path, header in self._headers(checkpoint).items() if header.options == options]

    def _headers(self, checkpoint: str) -> dict[Path, WeightHeader]:
        """Cache files of a checkpoint that this version of the packing code wrote, with their headers."""
        paths = (file.path for file in self.files() if file.path.name.startswith(checkpoint))
        headers = ((path, try_header(path)) for path in paths)
        asked = (checkpoint, self.code)
        return {path: header for path, header in headers if header and (header.checkpoint, header.code) == asked}

    def remove_superseded(self, path: Path, header: WeightHeader) -> None:
        """Remove cache files that the file ``path`` with ``header`` replaces: files for its model, slice and options that were made
        from another checkpoint or by another version of the code."""
        for file in self.files():
            other = try_header(file.path) if file.path != path else None
            if other and (other.model, other.slice, other.options) == (header.model, header.slice, header.options):
                file.path.unlink(missing_ok=True)

    def mapped_bytes(self, maps: Path = Path("/proc/self/maps")) -> int:
        """Bytes of cache files that are mapped into this process's memory, from its list of mappings ``maps``."""
        total, begin = 0, f"{self.folder.resolve()}/"
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                address, *_, path = line.split(maxsplit=5)
                if path.startswith(begin) and SUFFIX in path:
                    first, last = (int(part, 16) for part in address.split("-"))
                    total += last - first
        return total

    def make_room(self, num_bytes: int) -> None:
        """Evict files until a file of ``num_bytes`` may be written.

        Raises:
            NoRoom: the file must not be written.
        """
        if num_bytes > self._limit:
            raise NoRoom(f"they need {num_bytes / GIB:.1f} GiB, more than --weight-cache-size {self._limit / GIB:g}")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if kind := network_file_system(self.folder):
            raise NoRoom(f"{self.folder} is on a network file system ({kind}), whose files are not mapped")
        self._remove_unfinished()
        files = self.files()
        while files and sum(file.size for file in files) + num_bytes > self._limit:
            files.pop().path.unlink(missing_ok=True)
        disk = shutil.disk_usage(self.folder)
        left = min(self._free_bytes, FREE_FRACTION * disk.total)
        if disk.free - num_bytes < left:
            raise NoRoom(
                f"the disk of {self.folder} has {disk.free / GIB:.1f} GiB of free space, and {left / GIB:.1f} GiB must stay free"
            )

    def clean(self) -> int:
        """Remove all files except files that are being written. Returns their size in bytes.

        Raises:
            OSError: a file cannot be removed.
        """
        self._remove_unfinished()
        files = self.files()
        for file in files:
            file.path.unlink(missing_ok=True)
        return sum(file.size for file in files)

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[BinaryIO | None]:
        """Open a new file, which is renamed to ``path`` when the block ends without an error; None if another process is writing
        it.

        Raises:
            OSError: the file cannot be written.
        """
        unfinished = path.with_suffix(UNFINISHED)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.ExitStack() as stack:
            with self._locked_folder():
                file = stack.enter_context(open(os.open(unfinished, flags, 0o600), "ab", buffering=0))
                is_own = try_lock(file) and is_at(file, unfinished)
            if not is_own:  # another process is writing the file, or has just written it
                yield None
                return
            try:
                os.fchmod(file.fileno(), 0o600)
                file.truncate(0)  # truncates what a killed process may have written
                yield file
                os.fsync(file.fileno())  # else the name could reach the disk before the data
                os.replace(unfinished, path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
        sync_folder(self.folder)

    def _remove_unfinished(self) -> None:
        """Remove unfinished files of killed processes, and anything else whose name is that of an unfinished file."""
        unfinished = list(self.folder.glob(f"*{UNFINISHED}"))
        with self._locked_folder() if unfinished else contextlib.nullcontext():
            for path in unfinished:
                with contextlib.suppress(OSError):
                    try:
                        with open_own(path) as file:
                            is_left = try_lock(file)
                    except Damaged:
                        is_left = True
                    if is_left:
                        path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[None]:
        """Hold the folder's lock: a new file is not mistaken for the rest of a killed process before it is locked itself."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def checkpoint_digest(directory: Path) -> str:
    """Digest of a checkpoint's files, from their metadata in the file system.

    Inode and change time distinguish a file from another of equal name, size and date: neither copying nor ``touch`` can set them. Hashing
    the contents would take as long as loading the checkpoint.

    Raises:
        OSError: a file does not exist.
        UserError: the checkpoint has no weights.
    """
    configs = directory.glob("*.json") if directory.is_dir() else ()
    paths = sorted([*configs, *open_model(directory).weight_files()])
    return digest([(path.name, *_identity(path)) for path in paths])


def code_digest() -> str:
    """Digest of the code that determines packed weights: metadata of its files, and plugins."""
    files = []
    for source in SOURCES:
        for folder, _, names in os.walk(PACKAGE / source):
            files += [f"{folder}/{name}" for name in names if name.endswith(CODE)]
    statuses = {path.removeprefix(str(PACKAGE)): os.stat(path) for path in sorted(files)}
    own = [(path, status.st_size, status.st_mtime_ns) for path, status in statuses.items()]
    return digest(own, PLUGINS.computing_code())


def _identity(path: Path) -> Sequence[int]:
    """Size, modification time, change time and inode of a file, which together identify its contents."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def read_header(file: BinaryIO) -> tuple[WeightHeader, int]:
    """Header of an open cache file, and the size of its data in bytes.

    Raises:
        Damaged: the file has no valid header.
        OSError: the file cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    if size < TRAILER.size:
        raise Damaged(f"it is truncated at {size} bytes")
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
    """Header of a cache file; None if the file has no valid header."""
    try:
        with open_own(path) as file:
            return read_header(file)[0]
    except (OSError, Damaged):
        return None


def encode_header(header: WeightHeader, data_bytes: int) -> bytes:
    """Bytes that follow the data in a cache file: header and trailer."""
    encoded = msgspec.msgpack.encode(header)
    return encoded + TRAILER.pack(data_bytes, len(encoded), hashlib.blake2b(encoded, digest_size=32).digest(), MAGIC)


def network_file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system of a folder, if it is in ``NETWORKS``; empty otherwise."""
    try:
        lines = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    place, kinds = str(folder.resolve()), {}
    for _, point, kind, *_ in lines:
        point = point.replace("\\040", " ")
        if place == point or place.startswith(point.rstrip("/") + "/"):
            kinds[len(point)] = kind  # of several mounts on one point, the last is visible
    kind = kinds[max(kinds)] if kinds else ""
    return kind if kind.startswith(NETWORKS) else ""
