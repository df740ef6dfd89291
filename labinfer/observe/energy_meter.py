"""``EnergyMeter``: joules used by the CPU packages of a host and by an accelerator, read from the hardware's own counters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from labinfer.base.errors import first_line

POWERCAP = Path("/sys/class/powercap")
"""Folder of the kernel's powercap framework, with a zone for each energy counter (RAPL of Intel and AMD)."""
READ_SECONDS = 30.0
"""Interval in seconds between two readings of a counter that wraps around: the smallest range of a package's counter,
65 kJ, lasts 131 s at 500 W."""


@dataclass(frozen=True, kw_only=True)
class EnergyCounter:
    """Counter of the joules that one part of a host (a CPU package or an accelerator) uses."""

    name: str
    """Name of the counted part, such as ``package-0`` or ``cuda:0``; unique in a meter."""
    read: Callable[[], float]
    """Returns joules since an arbitrary time. Raises an exception whose text says why the counter cannot be read."""
    range: float = 0.0
    """Joules at which the counter wraps around to 0; 0 if it never does."""


class EnergyMeter:
    """Measures the energy in joules that each of its counters has counted since the last ``begin``. Threads may share a
    meter.

    A counter that wraps around is also read every ``interval`` seconds by a thread, so that no wrap-around is missed in
    a long run.

    Args:
        counters: counters that this rank reads.
        missing: why other counters of this rank cannot be read.
    """

    def __init__(self, counters: Iterable[EnergyCounter], missing: Sequence[str] = (), interval: float = READ_SECONDS):
        self._counters = list(counters)
        self.missing = list(missing)
        """Reasons why counters of this rank are not measured; a counter that fails adds one."""
        self._joules: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._lock = threading.Lock()
        self.begin()
        if any(counter.range for counter in self._counters):
            # The thread must not keep a meter alive whose model was dropped.
            dropped = threading.Event()
            weakref.finalize(self, dropped.set)
            arguments = (weakref.ref(self), dropped, interval)
            threading.Thread(target=_read_regularly, args=arguments, name="energy", daemon=True).start()

    def begin(self) -> None:
        """Restart the measurement: set the joules of every counter to 0."""
        with self._lock:
            self._advance()
            self._joules = dict.fromkeys(self._joules, 0.0)

    def read(self) -> dict[str, float]:
        """Joules since ``begin``, by name of the counter. A counter that fails is no longer measured."""
        with self._lock:
            self._advance()
            return dict(self._joules)

    def _advance(self) -> None:
        for counter in [*self._counters]:
            try:
                now = counter.read()
            except Exception as error:  # noqa: BLE001 - a vendor's library or a plugin may raise anything
                self.missing.append(f"{counter.name}: {first_line(error)}")
                self._counters.remove(counter)
                self._joules.pop(counter.name, None)  # a sum that no longer grows would look valid
                continue
            used = now - self._last.get(counter.name, now)
            self._joules[counter.name] = self._joules.get(counter.name, 0.0) + (
                used % counter.range if counter.range else used
            )
            self._last[counter.name] = now


def _read_regularly(meter: weakref.ref[EnergyMeter], dropped: threading.Event, interval: float) -> None:
    while not dropped.wait(interval):
        if (living := meter()) is not None:
            living.read()
        del living


def find_packages(root: Path = POWERCAP) -> tuple[list[EnergyCounter], list[str]]:
    """Counters of this host's CPU packages and of their DRAM, and reasons why other counters cannot be read.

    Other zones of powercap are left out, as they would count energy twice: ``core`` and ``uncore`` are parts of a package, ``psys``
    contains the packages, and ``intel-rapl-mmio`` is a second view of the packages.

    Args:
        root: folder of the powercap zones.
    """
    counters: list[EnergyCounter] = []
    missing: list[str] = []
    for zone in sorted(root.glob("intel-rapl:*")):
        try:
            name = _read_text(zone / "name")
            if name == "dram":
                name = f"{_read_text(zone.with_name(zone.name.rpartition(':')[0]) / 'name')} dram"
            elif not name.startswith("package"):
                continue
            _read_joules(zone / "energy_uj")
            whole = _read_joules(zone / "max_energy_range_uj")
            if any(counter.name == name for counter in counters):  # a zone of each die, or of each memory controller
                name = f"{name} ({zone.name})"
            counters.append(EnergyCounter(name=name, read=partial(_read_joules, zone / "energy_uj"), range=whole))
        except PermissionError:
            missing.append(f"needs read permission for {root}/intel-rapl:*/energy_uj")
        except (OSError, ValueError) as error:
            missing.append(f"{zone}: {first_line(error)}")
    if not counters and not missing:
        missing.append(f"no CPU package in {root}")
    return counters, [*dict.fromkeys(missing)]


def _read_text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def _read_joules(path: Path) -> float:
    return int(_read_text(path)) / 1e6
