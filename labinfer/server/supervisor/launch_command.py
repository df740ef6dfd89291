"""LaunchCommand: an mpirun command line whose hosts can be replaced, to start ranks on some of them, or a short command on one."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from labinfer.comm.spmd.end_launcher import LAUNCHERS

HOST_LISTS, HOST_FILES = ("hosts", "host", "H"), ("hostfile", "machinefile", "default-hostfile", "f")
COUNTS = ("n", "np")
NODE_NAME = re.compile(r"labinfer-node=(\S+)")
PRINT_NODE_NAME = 'echo "labinfer-node=${LABINFER_NODE_NAME:-$(uname -n)}"'
"""Shell command that prints the node name of a machine, as ranks on the machine determine it."""


@dataclass(frozen=True)
class LauncherOption:
    """An option of mpirun for hosts or for the number of ranks, and the position of its value in the command line."""

    index: int
    """Index of the word of the command line that has the option's value."""
    prefix: str
    """Part of the word at ``index`` before the value, such as ``--host=`` in ``--host=a,b``; empty if the value is a word by
    itself."""
    name: str
    entries: tuple[str, ...] = ()
    """Entries of the option's host list, with slot counts if given: ``node-a:2``, or ``node-a slots=2`` in a host
    file."""


class LaunchCommand:
    """A command line that starts ranks. ``hosts`` is empty if the launcher is not mpirun, has no option for hosts, or
    starts several programs.

    Args:
        words: all words of the command line.
        launch: index of ``launch.py`` in ``words``.
        directory: private directory, in which host files are written.
    """

    def __init__(self, words: Sequence[str], launch: int, directory: Path):
        self._words, self._directory = list(words), directory
        pythons = [index for index, word in enumerate(words[:launch]) if Path(word).name.startswith("python")]
        self._program = pythons[-1] if pythons else launch
        own = self._words[: self._program]
        self._options = list(_options(own)) if Path(words[0]).name in LAUNCHERS and ":" not in own else []
        self.hosts = tuple(dict.fromkeys(_host(entry) for option in self._options for entry in option.entries))

    def start(self, hosts: Sequence[str], num_ranks: int) -> list[str]:
        """Return the command line that starts ``num_ranks`` ranks on ``hosts`` only."""
        return self._launcher(hosts, num_ranks) + self._words[self._program :]

    def print_node_name(self, host: str) -> list[str]:
        """Return a command line that starts ``PRINT_NODE_NAME`` on ``host`` through the launcher. ``NODE_NAME`` finds
        the name in the output."""
        return [*self._launcher([host], 1), "sh", "-c", PRINT_NODE_NAME]

    def _launcher(self, hosts: Sequence[str], num_ranks: int) -> list[str]:
        words = self._words[: self._program]
        for option in self._options:
            entries = [entry for entry in option.entries if _host(entry) in hosts] or hosts
            if option.name in COUNTS:
                value = str(num_ranks)
            elif option.name in HOST_LISTS:
                value = ",".join(entries)
            else:
                value = self._write_file("".join(f"{entry}\n" for entry in entries))
            words[option.index] = option.prefix + value
        return words

    def _write_file(self, text: str) -> str:
        path = self._directory / f"hosts-{zlib.crc32(text.encode()):08x}"
        path.write_text(text)
        return str(path)


def _options(words: list[str]) -> Iterator[LauncherOption]:
    for place, word in enumerate(words):
        flag, is_joined, value = word.partition("=")
        name = flag.lstrip("-")
        if not word.startswith("-") or (not is_joined and place + 1 == len(words)):
            continue
        if not is_joined:
            value = words[place + 1]
        index, prefix = (place, f"{flag}=") if is_joined else (place + 1, "")
        if name in COUNTS:
            yield LauncherOption(index, prefix, name)
        elif name in HOST_LISTS:
            yield LauncherOption(index, prefix, name, tuple(value.split(",")))
        elif name in HOST_FILES:
            with suppress(OSError, UnicodeDecodeError):  # the launcher will report the error
                lines = [line.partition("#")[0].strip() for line in Path(value).read_text().splitlines()]
                yield LauncherOption(index, prefix, name, tuple(line for line in lines if line))


def _host(entry: str) -> str:
    return re.split(r"[:\s]", entry, maxsplit=1)[0]
