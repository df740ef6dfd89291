"""``launch.py`` on a host whose energy counters are in the folder ``POWERCAP_TREE``."""

from __future__ import annotations

import functools
import os
import runpy
from pathlib import Path

from labinfer.launch import build
from labinfer.launch.energy_counters import open_energy_meter

if __name__ == "__main__":
    build.open_energy_meter = functools.partial(open_energy_meter, powercap=Path(os.environ["POWERCAP_TREE"]))
    runpy.run_path(str(Path(__file__).parents[2] / "launch.py"), run_name="__main__")
