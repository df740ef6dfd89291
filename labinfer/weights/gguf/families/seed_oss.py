"""Seed-OSS in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import ATTENTION, LATE_NORMS, MLP


def read_seed_oss(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Key for Seed-OSS: whether the output projection of attention has a bias."""
    return {"attention_out_bias": "blk.0.attn_output.bias" in file.tensors}


FAMILIES = {
    "seed_oss": GgufFamily(
        architecture="SeedOssForCausalLM", parts=LATE_NORMS | ATTENTION | MLP, read_config=read_seed_oss
    )
}
