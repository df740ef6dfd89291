"""Plugins: Python files and modules that register parts, loaded on every rank before the command line is parsed.

Rank 0 reads a plugin's file and sends its bytes to the other ranks, so that no node needs a copy. A module is installed
on each node, and ranks compare its digest. No plugin is loaded unless ``--plugin`` names it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

import labinfer
from labinfer.base.errors import UserError
from labinfer.base.kinds import KINDS
from labinfer.base.registry import REGISTRY, Registry
from labinfer.base.sampling_params import SamplingParameter

FLAG = "--plugin"
ENTRY_POINTS = "labinfer.plugins"
"""Group of entry points in installed packages, in which names of plugins are looked up."""
LAB = Path(labinfer.__file__).parents[1] / "lab"
"""Folder for experiments in a checkout of this project: ``--plugin NAME`` finds ``lab/NAME.py``."""
PROCESSOR = "logits_processor"
MAX_BYTES = 1 << 24
"""Maximum size in bytes of a plugin file, which is sent to the other ranks."""


class PluginSource(msgspec.Struct, frozen=True, array_like=True):
    """A plugin that was found by its name; it may not be imported yet."""

    name: str
    """File name without ``.py``, or name of the module."""
    path: str
    """Path of the plugin's file on rank 0's machine."""
    digest: str
    """BLAKE2b digest of the contents of the plugin's file, as 16 hexadecimal digits."""
    code: bytes = b""
    """Contents of the file; empty for a module, which each node imports from its own disk."""
    parameters: dict[str, SamplingParameter] = {}
    """Sampling parameters of the plugin's logits processors, by name; empty until the plugin is loaded."""

    def __str__(self) -> str:
        return f"{self.name} ({self.path}, {self.digest})"

    @property
    def is_file(self) -> bool:
        return bool(self.code)


class Plugins:
    """The plugins of this process.

    Args:
        registry: registry to which the plugins add parts.
    """

    def __init__(self, registry: Registry = REGISTRY):
        self._registry = registry
        self.loaded: list[PluginSource] = []

    def load(self, sources: Iterable[PluginSource]) -> None:
        """Import plugins in the given order. Plugins that are already loaded are skipped.

        Raises:
            UserError: a plugin raises, or another plugin of its name is loaded; the text names file and line.
        """
        for source in sources:
            known = next((plugin for plugin in self.loaded if plugin.name == source.name), None)
            if known is None:
                self.loaded.append(self._import(source))
            elif known.digest != source.digest:
                raise UserError(
                    f"{FLAG} {source.name}: {source.path} ({source.digest}) has the same name as {known.path} "
                    f"({known.digest}), which is already loaded; rename one, or start a new process"
                )

    def _import(self, source: PluginSource) -> PluginSource:
        with _blame(source), self._registry.registering_for(source.name):
            if source.is_file:
                run_file(source)
            else:
                _import_module(source.name)
        added = self._registry.added_by(source.name)
        if not added:
            raise UserError(
                f"{FLAG} {source.name}: {source.path} registers nothing; decorate a function or class with "
                "@register, and do not import the plugin as a module elsewhere"
            )
        details = {name: self._registry.entry(kind, name).details for kind, name in added if kind == PROCESSOR}
        parameters = {name: detail["parameter"] for name, detail in details.items() if detail}
        return msgspec.structs.replace(source, parameters=parameters)

    def adopt(self, sources: Iterable[PluginSource]) -> None:
        """Register, in the gateway process, the plugins that the ranks have loaded, with their sampling parameters.

        Nothing is imported: a plugin may need torch, which the gateway does not import.
        """
        for source in sources:
            for name, parameter in source.parameters.items():
                self._registry.mirror(PROCESSOR, name, source.name, parameter=parameter)
            self.loaded.append(source)

    def blame(self, name: str) -> AbstractContextManager[None]:
        """Context in which an error in a plugin's code becomes a ``UserError`` with file and line. For code that runs
        at startup. A ``UserError`` passes unchanged.

        Args:
            name: plugin that the code belongs to, as ``RegistryEntry.origin``. If no such plugin is loaded, all errors
                pass unchanged.
        """
        source = next((source for source in self.loaded if source.name == name), None)
        return _blame(source, keeps_refusals=True) if source is not None else nullcontext()

    def identities(self) -> list[str]:
        """Name and digest of each plugin, for reports and fingerprints."""
        return [f"{source.name}@{source.digest}" for source in self.loaded]

    def computing_code(self) -> list[str]:
        """Digests of all code outside of LABInfer that decides what layers compute: plugins, and files of the calling
        program."""
        kinds = [kind for kind, listed in KINDS.items() if listed.computes]
        entries = [entry for kind in kinds for entry in self._registry.plugged_in(kind).values()]
        plugins = {source.name: f"{source.name}@{source.digest}" for source in self.loaded}
        return sorted({plugins.get(entry.origin) or _source_digest(entry.part) for entry in entries})


PLUGINS = Plugins()
"""Plugins of this process."""


def named_plugins(arguments: Sequence[str]) -> list[str]:
    """Values of ``--plugin`` in the arguments of a command line that is not parsed yet: plugins may add commands and
    flags."""
    names = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == FLAG and index + 1 < len(arguments):
            names.append(arguments[index + 1])
        elif argument.startswith(f"{FLAG}="):
            names.append(argument.partition("=")[2])
    return list(dict.fromkeys(names))


def find_plugin(given: str) -> PluginSource:
    """Find a plugin by the value of ``--plugin``: ``FILE.py``, the name of a file in ``lab/`` or of an entry point, or
    a module.

    Raises:
        UserError: the plugin cannot be found or read.
    """
    if given.endswith(".py") or os.sep in given:
        return read_file(f"{FLAG} {given}", Path(given))
    if given.isidentifier() and (path := LAB / f"{given}.py").is_file():
        return read_file(f"{FLAG} {given}", path)
    import importlib.metadata  # takes a tenth of the time of --help

    entry_points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    module = next((point.module for point in entry_points if point.name == given), given)
    return _find_module(given, module)


def share_plugins(
    names: Sequence[str], rank: int, gather: Callable[[bytes], list[bytes]], describe_rank: Callable[[int], str]
) -> list[PluginSource]:
    """Make all ranks load the same plugins; collective. Files are sent by rank 0; modules must have the same digest on
    every rank.

    Args:
        names: values of ``--plugin``.
        gather: all-gather of bytes: returns those of each rank, by rank.
        describe_rank: names a rank and its host, for errors.

    Raises:
        UserError: a plugin is missing or broken on a rank, or differs from rank 0's; every rank raises it.
    """
    first, problem = [], ""
    if rank == 0:
        try:
            first = [find_plugin(name) for name in names]
        except UserError as error:
            problem = str(error)
    sent = gather(msgspec.msgpack.encode((problem, first)) if rank == 0 else b"")[0]
    problem, sources = msgspec.msgpack.decode(sent, type=tuple[str, list[PluginSource]])
    if problem:
        raise UserError(problem)
    own = [source.digest if source.is_file else _digest_here(source) for source in sources]
    for number, data in enumerate(gather(msgspec.msgpack.encode(own))):
        for source, digest in zip(sources, msgspec.msgpack.decode(data, type=list[str]), strict=True):
            if not digest:
                raise UserError(
                    f"{FLAG} {source.name}: {describe_rank(number)} has no module {source.name}; install it there, or give a file"
                )
            if digest != source.digest:
                raise UserError(
                    f"{FLAG} {source.name}: {describe_rank(number)} has another version ({digest}) than rank 0 ({source.digest}); "
                    "install the same one on every node"
                )
    return sources


def read_file(option: str, path: Path) -> PluginSource:
    """Read a file of Python code.

    Args:
        option: option that named the file, for errors.

    Raises:
        UserError: the file cannot be read, is empty or too long.
    """
    try:
        code = path.read_bytes()
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read: {error.strerror or error}") from None
    if not code.strip():
        raise UserError(f"{option}: {path} is empty")
    if len(code) > MAX_BYTES:
        raise UserError(f"{option}: {path} has {len(code)} bytes; a plugin's file has at most {MAX_BYTES}")
    return PluginSource(path.stem, str(path), _digest([code]), code)


def run_file(source: PluginSource) -> types.ModuleType:
    """Run a plugin's file as a module. It is added to ``sys.modules``, where dataclasses look it up."""
    name = f"labinfer_plugin_{source.name}"
    module = types.ModuleType(name, f"The plugin {source.path}.")
    module.__file__ = source.path
    sys.modules[name] = module
    try:
        exec(compile(source.code, source.path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def locate(error: BaseException, path: str) -> str:
    """Location of an error: ``path``, with the line in that file that raised the error or called the code that did."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}, line {frames[-1].lineno}" if frames else path


def describe_error(error: BaseException) -> str:
    """Describe an error in one line by its type and text; a ``UserError`` by its text alone."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"[:300]


def _find_module(given: str, module: str) -> PluginSource:
    """Find a Python module without importing it. Only its top-level package is looked up, as finding a submodule runs
    the package's code."""
    import importlib.util

    names = module.split(".")
    try:
        spec = importlib.util.find_spec(names[0]) if all(map(str.isidentifier, names)) else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise UserError(
            f"{FLAG} {given}: there is no file lab/{given}.py, no entry point of {ENTRY_POINTS} and no Python module of this name with "
            "a .py file; give the path of a file, or a name from these"
        )
    try:
        return PluginSource(module, spec.origin, _module_digest(spec))
    except OSError as error:
        raise UserError(f"{FLAG} {given}: {error.filename} cannot be read: {error.strerror or error}") from None


def _import_module(name: str) -> None:
    """Import a module. On an error, remove its package's newly imported modules from ``sys.modules``, so that a retry
    imports them again."""
    before = set(sys.modules)
    try:
        importlib.import_module(name)
    except BaseException:
        top = name.partition(".")[0]
        for module in set(sys.modules) - before:
            if module.partition(".")[0] == top:
                del sys.modules[module]
        raise


def _digest_here(source: PluginSource) -> str:
    """Digest of a plugin module as installed on this rank's machine; empty if it is missing."""
    try:
        return _find_module(source.name, source.name).digest
    except UserError:
        return ""


def _module_digest(spec: importlib.machinery.ModuleSpec) -> str:
    """Digest of a module's file. For a package: of all Python files in it and its subpackages."""
    folder = Path(spec.origin).parent
    paths = sorted(folder.rglob("*.py")) if spec.submodule_search_locations else [Path(spec.origin)]
    return _digest(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() for path in paths)


def _digest(contents: Iterable[bytes]) -> str:
    from hashlib import blake2b  # with OpenSSL, which a start without plugins does not need

    digest = blake2b(digest_size=8)
    for content in contents:
        digest.update(blake2b(content).digest())
    return digest.hexdigest()


@contextmanager
def _blame(source: PluginSource, keeps_refusals: bool = False) -> Iterator[None]:
    """Turn errors in a plugin's code into a ``UserError`` with file and line.

    Args:
        keeps_refusals: whether a ``UserError`` passes unchanged.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if keeps_refusals and isinstance(error, UserError):
            raise
        raise UserError(f"{FLAG} {source.name}: {locate(error, source.path)}: {describe_error(error)}") from error


def _source_digest(part: Any) -> str:
    """Digest of the file that defines a function or class. A random digest if there is no file (interactive Python)."""
    try:
        return _digest([Path(inspect.getfile(part)).read_bytes()])
    except (OSError, TypeError):
        return os.urandom(8).hex()
