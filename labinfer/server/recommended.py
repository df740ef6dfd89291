"""What a checkpoint recommends for sampling."""

from __future__ import annotations

from pathlib import Path

from labinfer.errors import UserError
from labinfer.plan import SamplingParams
from labinfer.weights.json_file import read_json

GENERATION_CONFIG = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Of Hugging Face's ``GenerationConfig``."""


def recommended_sampling(directory: Path) -> dict[str, float]:
    """By name of ``SamplingParams``; empty where the checkpoint says nothing.

    Raises:
        UserError: the file is broken.
    """
    path = directory / GENERATION_CONFIG
    if not path.exists():
        return {}
    config = read_json(path)
    if config.get("do_sample") is False:  # its numbers are meant for when sampling is asked for
        return {}
    given = {name: config[name] for name in FIELDS if config.get(name) is not None}
    try:
        SamplingParams(**given)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return given
