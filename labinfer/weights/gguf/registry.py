"""read_family: the ``GgufFamily`` of a file, by its ``general.architecture``. Does not import torch."""

from __future__ import annotations

from labinfer.base.errors import UserError
from labinfer.weights.gguf.families import (
    deepseek,
    ernie,
    exaone,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    minimax,
    olmo,
    phi,
    qwen,
    qwen_hybrid,
    seed_oss,
)
from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile

FAMILIES = {
    name: family
    for module in (
        *(llama, granite, qwen, qwen_hybrid, gemma, gemma4, gpt_oss, deepseek, glm),
        *(minimax, phi, hunyuan, ernie, seed_oss, olmo, exaone),
    )
    for name, family in module.FAMILIES.items()
}
"""Families by ``general.architecture``."""

MMPROJ = "clip"
"""``general.architecture`` of files with encoders of images or audio."""


def read_family(file: GgufFile) -> tuple[str, GgufFamily]:
    """The file's ``general.architecture``, which is also the prefix of its metadata keys, and the family of this architecture.

    Raises:
        UserError: the architecture is not supported.
    """
    name = file.prefix
    if name == MMPROJ:
        raise UserError(
            f"{file.path} is an encoder of images or audio (mmproj), not a model; give --model the model's own GGUF file, which runs "
            "without it (text only)"
        )
    if name not in FAMILIES:
        raise UserError(
            f"{file.path}: architecture {name!r:.60} of GGUF files is not supported; supported are {', '.join(FAMILIES)}"
        )
    return name, FAMILIES[name]
