"""Registry: all parts of LABInfer that are chosen by name, shipped or added by a plugin.

    from labinfer import register

    @register("batch_policy", "one_prompt")
    def one_prompt(state):
        ...

Shipped parts are listed in ``kinds.py`` by module, and imported when first used. Flags, ``--help`` and errors take
their choices from the registry. There is one registry per process, and registered parts are never removed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from labinfer.base.errors import UserError
from labinfer.base.kinds import KINDS

Part = TypeVar("Part")
SCRIPT = "this program"
"""Value of ``RegistryEntry.origin`` for parts that the calling program registers itself, outside of any plugin."""


@dataclass(frozen=True, kw_only=True)
class RegistryEntry:
    """A registered part (a function or class) and where it comes from.

    Args:
        part: the function or class; a shipped one as ``module:attribute``, until it is used.
        details: further keyword arguments of ``register``; the part's kind defines their names.
        origin: the plugin that registered it; empty for a shipped part.
    """

    part: Any
    details: dict[str, Any]
    origin: str = ""


class Registry:
    """Registered parts, by kind and name.

    Args:
        kinds: all kinds, each with its shipped parts.
    """

    def __init__(self, kinds=KINDS):
        self._kinds = kinds
        self._entries = {
            kind: {name: RegistryEntry(part=part, details={}) for name, part in listed.shipped.items()}
            for kind, listed in kinds.items()
        }
        self._origin = SCRIPT

    def register(self, kind: str, name: str, **details: Any) -> Callable[[Part], Part]:
        """Return a decorator that registers a function or class as the part ``name`` of a kind.

        Args:
            kind: one of ``kinds.KINDS``, which says where its contract is.
            details: keyword arguments that the kind's contract defines.

        Raises:
            UserError: the kind is unknown, the name is taken, or the decorated object breaks the kind's contract.
        """
        if kind not in self._kinds:
            raise UserError(f"register({kind!r:.60}, {name!r:.60}): unknown kind; kinds: {', '.join(self._kinds)}")
        if not isinstance(name, str) or not name or set(name) & set(", =\n"):
            raise UserError(f"register({kind!r}, {name!r:.60}): a name must have no spaces, commas or equals signs")

        def add(part: Part) -> Part:
            if (taken := self._entries[kind].get(name)) is not None:
                by = f"by {taken.origin}" if taken.origin else "as shipped with LABInfer"
                raise UserError(
                    f"register({kind!r}, {name!r}): the name is already registered {by}; choose another one"
                )
            self._check(kind, name, part, details)
            self._entries[kind][name] = RegistryEntry(part=part, details=details, origin=self._origin)
            return part

        return add

    def mirror(self, kind: str, name: str, origin: str, **details: Any) -> None:
        """Register a part that only other processes have imported, by its name and details."""
        self._entries[kind][name] = RegistryEntry(part=None, details=details, origin=origin)

    def find(self, kind: str, name: str) -> Any:
        """Find a function or class by ``kind`` and ``name``; a shipped one is imported.

        Raises:
            UserError: the name is unknown.
        """
        entry = self.entry(kind, name)
        return _load(entry.part) if isinstance(entry.part, str) else entry.part

    def entry(self, kind: str, name: str) -> RegistryEntry:
        """Find an entry by ``kind`` and ``name``.

        Raises:
            UserError: the name is unknown.
        """
        entry = self._entries[kind].get(name)
        if entry is None:
            raise UserError(
                f"unknown {kind.replace('_', ' ')} {name!r:.60}; available: {', '.join(self._entries[kind])}"
            )
        return entry

    def parts(self, kind: str) -> dict[str, Any]:
        """All functions or classes of a kind, by name; shipped ones are imported."""
        return {name: self.find(kind, name) for name in self._entries[kind]}

    def names(self, kind: str) -> tuple[str, ...]:
        """Names of all parts of a kind, shipped ones first."""
        return tuple(self._entries[kind])

    def plugged_in(self, kind: str) -> dict[str, RegistryEntry]:
        """Entries of a kind that plugins or the calling program have registered, by name."""
        return {name: entry for name, entry in self._entries[kind].items() if entry.origin}

    def added_by(self, origin: str) -> list[tuple[str, str]]:
        """Kind and name of each part that the plugin ``origin`` has registered."""
        return [
            (kind, name)
            for kind, entries in self._entries.items()
            for name, entry in entries.items()
            if entry.origin == origin
        ]

    @contextmanager
    def registering_for(self, origin: str) -> Iterator[None]:
        """Attribute the parts registered within the ``with`` block to the plugin ``origin``. If the block raises, they
        are removed."""
        before, self._origin = self._origin, origin
        try:
            yield
        except BaseException:
            for kind, name in self.added_by(origin):
                del self._entries[kind][name]
            raise
        finally:
            self._origin = before

    def _check(self, kind: str, name: str, part: Any, details: dict[str, Any]) -> None:
        """Check those rules of a kind's contract that code can check for ``part``.

        Raises:
            UserError: the part breaks a rule of the contract.
        """
        listed = self._kinds[kind]
        unknown = sorted(details.keys() - set(listed.details))
        if unknown:
            known = ", ".join(listed.details) or "none"
            raise UserError(
                f"register({kind!r}, {name!r}): {unknown[0]!r} is not a detail of this kind, which has: {known}"
            )
        if not callable(part):
            raise UserError(f"register({kind!r}, {name!r}) decorates {part!r:.60}; decorate a function or a class")
        if listed.is_class:
            base = _load(listed.contract)
            if not (isinstance(part, type) and issubclass(part, base)):
                raise UserError(f"register({kind!r}, {name!r}) needs a subclass of {listed.contract.replace(':', '.')}")
        if listed.check:
            try:
                _load(listed.check)(name, part, details)
            except UserError as error:
                raise UserError(f"register({kind!r}, {name!r}): {error}") from None


class Names(Sequence[str]):
    """The allowed values of an option that is chosen from the registry: all names of a kind that are registered when
    the option is read.

    Args:
        kind: kind in the registry.
        others: allowed values that are not in the registry, such as ``auto``.
    """

    def __init__(self, kind: str, *others: str):
        self._kind, self._others = kind, others

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, index):
        return self._all()[index]

    def _all(self) -> tuple[str, ...]:
        return self._others + REGISTRY.names(self._kind)


def _load(place: str) -> Any:
    """Import the object named by ``module:attribute``."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


REGISTRY = Registry()
"""The registry of this process."""
register = REGISTRY.register
