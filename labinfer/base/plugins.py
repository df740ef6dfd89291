"""Plugins: Python files and modules that register parts, loaded on every rank before anything is decided.

Rank 0 reads a plugin's file and sends its bytes to the other ranks, so that no node needs a copy. A module is installed on each
node, and ranks compare its digest. Nothing is loaded unless ``--plugin`` names it.
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
"""Group of entry points of installed packages, among which a name is looked for."""
LAB = Path(labinfer.__file__).parents[1] / "lab"
"""Folder of a checkout for ideas of its own: ``--plugin NAME`` finds ``lab/NAME.py``."""
PROCESSOR = "logits_processor"
MAX_BYTES = 1 << 24
"""Largest file that is sent to the other ranks."""


class PluginSource(msgspec.Struct, frozen=True, array_like=True):
    """A plugin that was found, and perhaps not loaded yet."""

    name: str
    """File name without ``.py``, or name of the module."""
    path: str
    """Path of the file on rank 0's machine."""
    digest: str
    """BLAKE2b of its contents, as 16 hexadecimal digits."""
    code: bytes = b""
    """Contents of the file; empty for a module, which each node imports from its own disk."""
    parameters: dict[str, SamplingParameter] = {}
    """Parameters of requests that it added, once it is loaded: those of its logits processors, by name."""

    def __str__(self) -> str:
        return f"{self.name} ({self.path}, {self.digest})"

    @property
    def is_file(self) -> bool:
        return bool(self.code)


class Plugins:
    """The plugins of this process.

    Args:
        registry: of what they register.
    """

    def __init__(self, registry: Registry = REGISTRY):
        self._registry = registry
        self.loaded: list[PluginSource] = []

    def load(self, sources: Iterable[PluginSource]) -> None:
        """Import plugins, in this order. One that is loaded already stays as it is.

        Raises:
            UserError: a plugin raises, or another one of the same name is loaded; the text names file and line.
        """
        for source in sources:
            known = next((plugin for plugin in self.loaded if plugin.name == source.name), None)
            if known is None:
                self.loaded.append(self._import(source))
            elif known.digest != source.digest:
                raise UserError(
                    f"{FLAG} {source.name}: {source.path} ({source.digest}) has the name of {known.path} ({known.digest}), which this "
                    "process has loaded; rename one, or start a new process"
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
                f"{FLAG} {source.name}: {source.path} registers nothing; decorate a function or class with @register, and do not import "
                "the plugin elsewhere"
            )
        details = {name: self._registry.entry(kind, name).details for kind, name in added if kind == PROCESSOR}
        parameters = {name: detail["parameter"] for name, detail in details.items() if detail}
        return msgspec.structs.replace(source, parameters=parameters)

    def adopt(self, sources: Iterable[PluginSource]) -> None:
        """In the gateway process: name the plugins that the ranks have loaded, and take requests with the parameters that they add.

        Nothing is imported, as a plugin may need torch, which that process does without.
        """
        for source in sources:
            for name, parameter in source.parameters.items():
                self._registry.mirror(PROCESSOR, name, source.name, parameter=parameter)
            self.loaded.append(source)

    def blame(self, name: str) -> AbstractContextManager[None]:
        """Turn an error of a plugin's code, called while a run starts, into a refusal that names file and line. A ``UserError`` stays.

        Args:
            name: the plugin that the code is of, as ``RegistryEntry.origin``; other code's errors stay as they are.
        """
        source = next((source for source in self.loaded if source.name == name), None)
        return _blame(source, keeps_refusals=True) if source is not None else nullcontext()

    def identities(self) -> list[str]:
        """Name and digest of each plugin, as reports and fingerprints have them."""
        return [f"{source.name}@{source.digest}" for source in self.loaded]

    def computing_code(self) -> list[str]:
        """Versions of all code but LABInfer's own that decides what layers compute: of plugins, and of this program's files."""
        kinds = [kind for kind, listed in KINDS.items() if listed.computes]
        entries = [entry for kind in kinds for entry in self._registry.plugged_in(kind).values()]
        plugins = {source.name: f"{source.name}@{source.digest}" for source in self.loaded}
        return sorted({plugins.get(entry.origin) or _source_digest(entry.part) for entry in entries})


PLUGINS = Plugins()
"""Plugins of this process."""


def named_plugins(arguments: Sequence[str]) -> list[str]:
    """The values of ``--plugin`` among the arguments of a command line, before they are parsed: a plugin may add commands and flags."""
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
    """Find a plugin: ``FILE.py``, the name of a file in ``lab/`` or of an entry point, or a module.

    Raises:
        UserError: it cannot be found or read.
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
    """Agree on plugins over all ranks; collective. Files come from rank 0; modules must have the same digest everywhere.

    Args:
        names: values of ``--plugin``.
        gather: gathers bytes of every rank, by rank.
        describe_rank: names a rank and its host, for errors.

    Raises:
        UserError: a plugin is missing or broken on a rank, or differs from rank 0's; on every rank alike.
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
        option: what named it, for errors.

    Raises:
        UserError: it cannot be read, is empty or too long.
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
    """Run a file as a module that can be found in ``sys.modules``, where dataclasses look for it."""
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
    """A file of the user's with the line at which it raised, or called what raised."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}, line {frames[-1].lineno}" if frames else path


def describe_error(error: BaseException) -> str:
    """Type and text of an error in one line; of a ``UserError`` the text alone."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"[:300]


def _find_module(given: str, module: str) -> PluginSource:
    """Find a module by its top package, which alone can be found without running code of the package."""
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
    """Import a module. If it raises, the modules that it has imported can be imported anew."""
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
    """Digest of a module on this rank; empty where there is none."""
    try:
        return _find_module(source.name, source.name).digest
    except UserError:
        return ""


def _module_digest(spec: importlib.machinery.ModuleSpec) -> str:
    """Digest of a module's file; of a package, of all Python files in it and its subpackages."""
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
    """Turn errors of a plugin's code into a ``UserError`` that names its file and line.

    Args:
        keeps_refusals: whether a ``UserError`` stays as it is.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if keeps_refusals and isinstance(error, UserError):
            raise
        raise UserError(f"{FLAG} {source.name}: {locate(error, source.path)}: {describe_error(error)}") from error


def _source_digest(part: Any) -> str:
    """Digest of the file that has a function or class; another one each time where it was typed at a prompt."""
    try:
        return _digest([Path(inspect.getfile(part)).read_bytes()])
    except (OSError, TypeError):
        return os.urandom(8).hex()
