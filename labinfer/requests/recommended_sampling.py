"""recommended_sampling: sampling parameters that a checkpoint recommends (Hugging Face's ``GenerationConfig``)."""

from __future__ import annotations

from pathlib import Path

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams, sampling_parameters
from labinfer.weights.hugging_face.directory import GENERATION
from labinfer.weights.model_files import open_model

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def recommended_sampling(checkpoint: Path) -> dict[str, int | float] | None:
    """Values that a checkpoint recommends for fields of ``SamplingParams`` and for sampling parameters of plugins. None if the
    checkpoint recommends greedy decoding (``do_sample`` is false), as its values are then for requests that ask for sampling.

    Raises:
        UserError: a number is out of bounds.
    """
    config = open_model(checkpoint).generation_config()
    if config.get("do_sample") is False:
        return None
    given = {name: config[name] for name in (*FIELDS, *sampling_parameters()) if config.get(name) is not None}
    try:
        SamplingParams(**given)
    except UserError as error:
        raise UserError(f"{checkpoint / GENERATION}: {error}") from None
    return given
