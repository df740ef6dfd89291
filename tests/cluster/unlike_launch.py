"""``launch.py`` on hosts of which each has its own accelerator, or none: the first argument has ``NAME@NODE`` for each rank."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    rank = int(os.environ.get("RANK") or os.environ.get("PMI_RANK") or 0)
    os.environ["FAKE_DEVICE"], os.environ["LABINFER_NODE_NAME"] = sys.argv.pop(1).split(",")[rank].split("@")
    script = Path(__file__).parent.parent.parent / "launch.py"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")
