"""The tool that writes checkpoints of random weights."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import random_checkpoint

ROOT = Path(__file__).parents[3]

PARAMETERS = {
    "qwen2-0.5b": 494_032_768,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama-3.2-3b": 3_212_749_824,
}
"""Parameters of published models, a tied LM head counted once."""


@pytest.mark.parametrize("shape", PARAMETERS)
def test_a_shape_has_as_many_parameters_as_the_published_model(tmp_path, shape):
    (tmp_path / "config.json").write_text(json.dumps(random_checkpoint.COMMON | random_checkpoint.SHAPES[shape]))
    sizes = random_checkpoint.tensor_shapes(tmp_path).values()
    assert sum(map(math.prod, sizes)) == PARAMETERS[shape]


def test_what_was_written_is_told(tmp_path):
    directory = tmp_path / "model"
    command = [sys.executable, str(ROOT / "tools" / "random_checkpoint.py"), "--dtype", "bfloat16", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size = sum(path.stat().st_size for path in directory.iterdir())
    (megabytes,) = re.fullmatch(
        rf"{directory}: ([0-9.]+) MB in bfloat16, of shape tiny, with random weights\n", done.stdout
    ).groups()
    assert float(megabytes) == round(size / 1e6, 1) > 0
