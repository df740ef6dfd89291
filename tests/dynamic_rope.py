"""Tiny checkpoints with rope of type ``dynamic``."""

from __future__ import annotations

import json
from pathlib import Path

from checkpoints import make_checkpoint

LIMIT, FACTOR = 32, 4.0
"""Positions that the checkpoint was made for, and by how much it is stretched."""


def make_dynamic(directory: Path, kind: str = "llama-untied", **parameters) -> Path:
    """A checkpoint whose rotary parameters are other than ``kind`` has them."""
    make_checkpoint(directory, kind)
    values = json.loads((directory / "config.json").read_text())
    values |= {"max_position_embeddings": LIMIT}
    values["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": FACTOR} | parameters
    (directory / "config.json").write_text(json.dumps(values))
    return directory
