"""Identity of a model: digests of all files that determine its output, taken at the first start and compared on later reads. Does
not import torch.

A file has a stamp: its size, modification time, change time and inode. A file on one machine whose stamp is unchanged was not
written to. If its stamp changed, digests of its contents are compared. A weight file of more than ``WHOLE_BYTES`` has a digest of
its header and of samples of all its tensors, as reading the whole file takes as long as loading it; with ``--reproducible`` it has
a digest of all its bytes, as any other file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from labinfer.base.errors import UserError
from labinfer.weights.gguf.file import SUFFIX as GGUF
from labinfer.weights.gguf.file import tensors_in
from labinfer.weights.hugging_face.tensor_names import MAX_HEADER_BYTES
from labinfer.weights.model_files import open_model

WHOLE_BYTES = 8 << 20
"""Largest weight file whose digest covers all its bytes."""
SAMPLE_BYTES = 1 << 10
"""Bytes of each sample of a large file that the digest reads."""
SAMPLE_EVERY = 8 << 20
"""A tensor has one sample, and one more for each ``SAMPLE_EVERY`` bytes of the tensor."""
CHUNK_BYTES = 1 << 20
SETTINGS = (
    "config.json",
    "generation_config.json",
    "*.safetensors.index.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "*.model",
    "chat_template.json",
    "*.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/*config.json",
)
"""Patterns of files besides the weights that determine a model's output: configs, tokenizers, templates, modules of embedding models.
Excludes other files in the directory, such as reports and outputs of runs."""
NUM_THREADS = 4


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Path and digest of a file that determines a model's output."""

    path: str
    """Absolute path on the first machine that read the file."""
    digest: str
    """Digest of the contents; see ``file_digest``."""
    is_sampled: bool
    """Whether ``digest`` covers only the header and samples of the tensors."""
    stamps: list[str]
    """Result of ``stamp(path)`` for the file on each machine: its size, modification time, change time and inode."""


Identity = dict[str, FileIdentity]
"""Identity of a model: its files, by label; labels stay when the model's directory is moved."""


@dataclass(frozen=True)
class Changes:
    """Differences between two identities of a model."""

    changed: list[str]
    """Paths of files that differ in content, are new, or are gone."""
    rewritten: list[str]
    """Paths of weight files that were written to, but have unchanged headers and samples."""

    def describe(self) -> str:
        """Text about the changed files; empty if there are none."""
        if not self.changed:
            return ""
        first, *others = self.changed
        if not others:
            return f"{first} has changed"
        return f"{first} and {len(others)} other file{'s' * (len(others) > 1)} have changed"


def model_files(model: Path) -> dict[str, Path]:
    """Weight files and config of a model, by label.

    Raises:
        UserError: the model has no weights.
    """
    files = open_model(model)
    return {path.name: path for path in (files.config_path, *files.weight_files())}


def setting_files(directory: Path) -> dict[str, Path]:
    """Config, tokenizer and template files of a model's or tokenizer's ``directory``, by label; for a GGUF file, the file itself."""
    if not directory.is_dir():
        return {directory.name: directory}
    paths = sorted({path for pattern in SETTINGS for path in directory.glob(pattern) if path.is_file()})
    return {str(path.relative_to(directory)): path for path in paths}


def template_files(chat_template: str, response_template: str) -> dict[str, Path]:
    """Files named by --chat-template and --response-template, by flag. Values that name a built-in template are
    skipped."""
    named = {"--chat-template": chat_template, "--response-template": response_template}
    return {flag: path for flag, name in named.items() if name and (path := Path(name)).is_file()}


def stamp(path: Path) -> str:
    """Size, modification time, change time and inode. Neither copying nor ``touch`` can set all of them.

    Raises:
        UserError: the file does not exist.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"


def identify(paths: Mapping[str, Path], whole: bool = False) -> Identity:
    """Current identity of the files ``paths``, given by label.

    Args:
        whole: whether to read all bytes of large weight files, too, instead of samples.

    Raises:
        UserError: a file cannot be read.
    """
    stamps = {label: stamp(path) for label, path in paths.items()}  # before the contents, to notice a write in between
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        digests = list(threads.map(partial(file_digest, whole=whole), paths.values()))
    return {
        label: FileIdentity(str(path.absolute()), digest, not whole and is_sampled(path), [stamps[label]])
        for (label, path), digest in zip(paths.items(), digests, strict=True)
    }


def merge(parts: Iterable[Identity]) -> Identity:
    """Merge the identities that several ranks computed of their copies of a model: each file gets the stamps of all copies."""
    merged: Identity = {}
    for part in parts:
        for label, file in part.items():
            known = merged.get(label, file)
            stamps = list(dict.fromkeys([*known.stamps, *file.stamps]))
            merged[label] = msgspec.structs.replace(known, stamps=stamps)
    return merged


def compare(before: Identity, now: Identity) -> Changes:
    """Find the files that differ between two identities of a model."""
    changed, rewritten = [], []
    for label in sorted(before.keys() | now.keys()):
        old, new = before.get(label), now.get(label)
        if old is None or new is None or old.digest != new.digest:
            changed.append((new or old).path)
        elif new.is_sampled and not set(new.stamps) <= set(old.stamps):
            rewritten.append(new.path)
    return Changes(changed, rewritten)


def changed_path(identity: Identity, paths: Mapping[str, Path]) -> Path | None:
    """Path of the first file whose content differs from ``identity``, or that is new or gone; None if there is none.

    Args:
        paths: current files, by label.

    Raises:
        UserError: a file cannot be read.
    """
    for label in identity.keys() - paths.keys():
        return Path(identity[label].path)
    for label, path in paths.items():
        known = identity.get(label)
        if known is None or not path.exists():
            return path
        if stamp(path) not in known.stamps and file_digest(path, whole=not known.is_sampled) != known.digest:
            return path
    return None


def combined_digest(identity: Identity) -> str:
    """One digest of the contents of all files."""
    contents = sorted((label, file.digest) for label, file in identity.items())
    return hashlib.sha256(msgspec.json.encode(contents)).hexdigest()[:32]


def is_sampled(path: Path) -> bool:
    """Whether ``file_digest(path)`` covers only the header and samples: a weight file of more than ``WHOLE_BYTES``."""
    return path.suffix in (".safetensors", GGUF) and path.stat().st_size > WHOLE_BYTES


def file_digest(path: Path, whole: bool = False) -> str:
    """Digest of a file's size and contents; for a large weight file, of its size, header and samples of all its tensors.

    Args:
        whole: whether to read all bytes of a large weight file, too.

    Raises:
        UserError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        sampled = not whole and is_sampled(path)
        with open(path, "rb", buffering=0) as file:
            fd = file.fileno()
            size = os.fstat(fd).st_size
            digest.update(size.to_bytes(8, "little"))
            spans = list(_samples(path, fd, size)) if sampled else [(0, size)]
            if sampled:
                for begin, end in spans:  # request all samples from the disk before waiting for the first
                    os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
            for begin, end in spans:
                for position in range(begin, end, CHUNK_BYTES):
                    digest.update(os.pread(fd, min(CHUNK_BYTES, end - position), position))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:32]


def _samples(path: Path, fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of a weight file's header and of each sample of its tensors."""
    first, tensors = _gguf_tensors(path, size) if path.suffix == GGUF else _safetensors(fd, size)
    yield 0, first
    for begin, end in tensors:
        count = 1 + (end - begin) // SAMPLE_EVERY
        for index in range(count):
            middle = begin + (end - begin) * (2 * index + 1) // (2 * count)
            sample = max(begin, middle - SAMPLE_BYTES // 2)
            yield sample, min(end, sample + SAMPLE_BYTES)


class _Entry(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)


def _safetensors(fd: int, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Size of the header in bytes, and byte ranges of the tensors. A file with an invalid header, which the loader refuses, counts as one
    tensor."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        return 8, [(8, size)]
    first = 8 + length
    try:
        header = msgspec.json.decode(os.pread(fd, length, 8), type=dict[str, _Entry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return first, [(first, size)]
    spans = sorted((first + begin, first + end) for begin, end in (entry.data_offsets for entry in header.values()))
    return first, [(begin, min(end, size)) for begin, end in spans if 0 <= begin < min(end, size)]


def _gguf_tensors(path: Path, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes before the first tensor of a GGUF file, and byte ranges of the tensors."""
    begins = sorted(tensor.position for tensor in tensors_in(path))
    return begins[0] if begins else size, list(zip(begins, [*begins[1:], size], strict=True))
