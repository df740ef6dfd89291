"""Tiny embedding models in the forms of published ones, and the vectors that sentence-transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checkpoints import CONFIGS, randomize, write_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModel

OLD_KEYS = {"lasttoken": "lasttoken", "mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
"""Ends of the keys ``pooling_mode_…``, by the newer name of the mode."""


def make_base_model(directory: Path, kind: str, **changes) -> Path:
    """A checkpoint of a base model, such as ``Qwen3Model``: no output head, and names without ``model.``.

    Args:
        changes: values of ``config.json`` that are other than those that Transformers writes.
    """
    torch.manual_seed(sum(map(ord, kind)))
    model = AutoModel.from_config(CONFIGS[kind]())
    randomize(model)
    model.save_pretrained(directory)
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | changes))
    write_tokenizer(directory)
    return directory


def write_modules(
    directory: Path, mode: str | list[str] = "lasttoken", *, normalize: bool = True, old: bool = True, **more
) -> Path:
    """The files of sentence-transformers beside a checkpoint.

    Args:
        old: write the mode as releases before 5.4 did.
        more: further values of the ``Pooling`` module.
    """
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    package = "sentence_transformers.models" if old else "sentence_transformers.base.modules"
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"{package}.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = [mode] if isinstance(mode, str) else mode
    if old:
        values = {f"pooling_mode_{end}": name in modes for name, end in OLD_KEYS.items()} | {
            "word_embedding_dimension": 8
        }
    else:
        values = {"pooling_mode": mode, "embedding_dimension": 8}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(values | more))
    return directory


@torch.no_grad()
def reference_vectors(directory: Path, prompts: list[list[int]], mode: str, normalize: bool) -> list[torch.Tensor]:
    """Vectors by sentence-transformers' formulas, of Transformers' hidden states after the final norm."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    vectors = []
    for prompt in prompts:
        states_TD = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        vector_D = {"lasttoken": states_TD[-1], "mean": states_TD.mean(dim=0), "cls": states_TD[0]}[mode]
        vectors.append(torch.nn.functional.normalize(vector_D, dim=0) if normalize else vector_D)
    return vectors


def worst_error(vectors: list[list[float]], expected: list[torch.Tensor]) -> float:
    """Largest |difference|, relative to the largest number of its vector."""
    pairs = zip(vectors, expected, strict=True)
    return max(float((torch.tensor(one) - other_D).abs().max() / other_D.abs().max()) for one, other_D in pairs)


def drop_tensors(directory: Path, *names: str) -> None:
    """Leave tensors out of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in names}, directory / "model.safetensors")
