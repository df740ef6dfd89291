"""The tool that writes checkpoints of random weights."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_what_was_written_is_told(tmp_path):
    directory = tmp_path / "model"
    command = [sys.executable, str(ROOT / "tools" / "random_checkpoint.py"), "--dtype", "bfloat16", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size = sum(path.stat().st_size for path in directory.iterdir())
    (megabytes,) = re.fullmatch(
        rf"{directory}: ([0-9.]+) MB in bfloat16, of shape tiny, with random weights\n", done.stdout
    ).groups()
    assert float(megabytes) == round(size / 1e6, 1) > 0
