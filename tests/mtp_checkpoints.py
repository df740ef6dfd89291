"""Checkpoints with an MTP layer, which Transformers would not write: made of two without."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checkpoints import CONFIGS, FULL, make_checkpoint
from safetensors.torch import load_file, save_file

MTP_KINDS = (
    "deepseek-v3",
    "glm4-moe",
    "glm-4.7-flash",
    "qwen3-next-moe",
    "qwen3.5",
    "qwen3.5-moe",
    "deepseek-v3.2",
    "hy3",
)
"""Kinds to which ``add_mtp`` can give an MTP layer."""


def mtp_names(kind: str) -> dict[str, str]:
    """Names of the parts of an MTP layer, by those in Qwen's checkpoints."""
    num_layers = CONFIGS[kind]().get_text_config().num_hidden_layers
    qwen = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0")
    if "qwen" in kind:
        return dict(zip(qwen, qwen, strict=True))
    parts = ("enorm", "hnorm", "eh_proj", "final_layernorm" if kind == "hy3" else "shared_head.norm")
    first = f"model.layers.{num_layers}"
    return dict(zip(qwen, [*(f"{first}.{part}" for part in parts), first], strict=True))


def add_mtp(directory: Path, kind: str, *, noise: float | None = None) -> dict[str, torch.Tensor]:
    """Give a checkpoint an MTP layer, and return its tensors but those of the decoder layer, under Qwen's names.

    The decoder layer is one of another checkpoint of this kind, which is written beside it: ``donor_layer`` has its number.

    Args:
        noise: all layers, and this one, add nothing, so that the next token depends on the last one alone; and the MTP layer gives
            the output head what the model gives it, but for this noise in its projection. None for layers as they are.
    """
    donor = make_checkpoint(directory.with_name(f"{directory.name}-donor"), kind, seed=1)
    tensors = load_file(directory / "model.safetensors")
    root = "model.language_model" if kind.endswith("pictures") else "model"
    size, names = tensors[f"{root}.norm.weight"].numel(), mtp_names(kind)
    centre = 0.0 if "qwen" in kind else 1.0
    parts = {name: centre + 0.3 * torch.randn(size) for name in names if "norm" in name}
    parts["mtp.fc"] = torch.randn(size, 2 * size) * size**-0.5
    if noise is not None:
        parts["mtp.fc"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1) + noise * parts["mtp.fc"]
        parts["mtp.pre_fc_norm_embedding"] = torch.full((size,), centre)
        parts["mtp.norm"] = tensors[f"{root}.norm.weight"].clone()
    prefix = f"{root}.layers.{donor_layer(kind)}."
    for name, tensor in load_file(donor / "model.safetensors").items():
        if name.startswith(prefix):
            tensors[f"{names['mtp.layers.0']}.{name.removeprefix(prefix)}"] = tensor
    tensors |= {f"{names[name]}.weight": tensor for name, tensor in parts.items()}
    if noise is not None:
        for name in tensors:
            if "o_proj" in name or "out_proj" in name or "down_proj" in name:
                tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    return parts


def donor_layer(kind: str) -> int:
    """Number of the layer of another checkpoint whose weights an MTP layer has: one of attention, with experts if any has."""
    config = CONFIGS[kind]().get_text_config()
    return config.layer_types.index(FULL) if "qwen" in kind else config.num_hidden_layers - 1
