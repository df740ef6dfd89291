"""What a decode step copies and waits for on make-believe cards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from launchers import run

DRIVER = "tests/cluster/device_steps_driver.py"


@dataclass
class DeviceStep:
    """Events of a decode step of one rank, by kind, as averages of 16 steps. Each kind has them by Python line."""

    events: dict[str, dict[str, float]]
    kernels: float

    @property
    def uploads(self) -> float:
        return self._sum("h2d", "late h2d")

    @property
    def downloads(self) -> float:
        return self._sum("d2h", "late d2h")

    @property
    def waits(self) -> float:
        """Operators and calls that wait for the card. Blocking copies wait as well, and are not among them."""
        return self._sum("wait")

    def inside(self, folder: str) -> dict[str, float]:
        """Events by line of those in files of a package, such as ``functions``."""
        return {
            f"{kind}: {line}": n
            for kind, lines in self.events.items()
            for line, n in lines.items()
            if f"{folder}/" in line
        }

    def check(self, uploads: int, downloads: int, waits: int = 0) -> None:
        """It has no more than so many; otherwise the lines are named."""
        made = (self.uploads, self.downloads, self.waits)
        assert all(n <= most for n, most in zip(made, (uploads, downloads, waits), strict=True)), (made, self.events)

    def _sum(self, *kinds: str) -> float:
        return sum(number for kind in kinds for number in self.events.get(kind, {}).values())


def device_steps(
    launcher: str, ranks: int, options: dict, samplings: list[dict], folder: Path, env: dict[str, str]
) -> dict[int, DeviceStep]:
    """Decode steps of sequences with one prompt, by rank, of those that ran on cards.

    Args:
        options: of the engine, such as ``device`` and ``model``.
        samplings: parameters of each sequence besides the number of tokens.
        env: that of the ``fake_device`` fixture.
    """
    folder.mkdir(exist_ok=True)
    job = {"options": options, "samplings": samplings, "folder": str(folder)}
    done = run(launcher, ranks, DRIVER, json.dumps(job), **env)
    assert done.returncode == 0, done.text
    steps = {}
    for file in folder.glob("*.json"):
        found = json.loads(file.read_text())
        kernels = found.pop("kernels")
        if kernels > 10:
            steps[int(file.stem)] = DeviceStep(found, kernels)
    assert steps, "nothing ran on a card"
    return steps
