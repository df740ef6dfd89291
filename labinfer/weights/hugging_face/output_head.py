"""has_different_head: whether a directory's LM head differs from the embedding although the config ties the two."""

from __future__ import annotations

from pathlib import Path

import torch

from labinfer.base.errors import UserError
from labinfer.weights.checkpoint_names import CheckpointNames
from labinfer.weights.hugging_face.tensor_names import has_head
from labinfer.weights.tensor_files import TensorFiles


def has_different_head(directory: Path, names: CheckpointNames) -> bool:
    """Whether a checkpoint directory has an LM head that is not a copy of the embedding.

    Compares both tensors up to the first difference. A quantized LM head counts as different. False if the files cannot be read;
    loading will report why.
    """
    if not has_head(directory):
        return False
    try:
        checkpoint = TensorFiles(directory)
    except UserError:
        return False
    names = names.resolve(checkpoint.names)
    head, embedding = names.stored("lm_head"), f"{names.stored('model.embed_tokens')}.weight"
    weight = f"{head}.weight"
    if weight not in checkpoint.names:
        return any(name.startswith(f"{head}.") for name in checkpoint.names)
    if embedding not in checkpoint.names:
        return False  # loading refuses the checkpoint and says why
    shapes = [checkpoint.shape(name) for name in (weight, embedding)]
    if shapes[0] != shapes[1] or not checkpoint.dtype(weight).is_floating_point:
        return True
    whole = ((0, shapes[0][0]),)
    pieces = [checkpoint.pieces(name, shapes[0], whole) for name in (weight, embedding)]
    if checkpoint.dtype(weight) == checkpoint.dtype(embedding):
        return any(not torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(*pieces, strict=True))
    return not torch.equal(*(checkpoint.read(name, shapes[0], whole, torch.float32) for name in (weight, embedding)))
