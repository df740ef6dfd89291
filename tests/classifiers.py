"""Tiny classifiers and rerankers in the forms of published ones, and what Transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checkpoints import CONFIGS, make_checkpoint, randomize, write_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

PAD = 5
"""Padding token of the classifiers, an ordinary token of the tokenizer."""


def make_classifier(directory: Path, kind: str, num_labels: int, **changes) -> Path:
    """A checkpoint of a ``…ForSequenceClassification``.

    Args:
        changes: values of ``config.json`` that are other than those that Transformers writes.
    """
    torch.manual_seed(sum(map(ord, kind)) + num_labels)
    config = CONFIGS[kind]()
    config.num_labels, config.get_text_config().pad_token_id = num_labels, PAD
    model = AutoModelForSequenceClassification.from_config(config)
    randomize(model)
    model.save_pretrained(directory)
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | changes))
    write_tokenizer(directory)
    return directory


@torch.no_grad()
def classifier_logits(directory: Path, prompts: list[list[int]]) -> list[list[float]]:
    """Logits of Transformers' own class, prompt by prompt."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    return [model(input_ids=torch.tensor([prompt])).logits[0].tolist() for prompt in prompts]


def make_reranker(directory: Path, kind: str = "qwen3") -> Path:
    """A causal language model whose tokenizer has the tokens ``yes`` and ``no``."""
    make_checkpoint(directory, kind)
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    vocabulary = values["model"]["vocab"]
    for text in {"yes", "no"} - vocabulary.keys():
        token = {"id": len(vocabulary) + len(values["added_tokens"]) - 3, "content": text}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        values["added_tokens"].append(token | flags)
    path.write_text(json.dumps(values))
    return directory


@torch.no_grad()
def token_shares(directory: Path, prompts: list[list[int]], ids: tuple[int, int]) -> list[float]:
    """Share of the first of two tokens in the softmax over their logits, prompt by prompt."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    logits = [model(input_ids=torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    return [float(logits_V[list(ids)].softmax(dim=0)[0]) for logits_V in logits]


def write_logit_score(directory: Path, true_id: int, false_id: int | None, **settings) -> None:
    """The files of sentence-transformers of a reranker by token logits."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_LogitScore",
            "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
        },
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_LogitScore").mkdir()
    values = {"true_token_id": true_id, "false_token_id": false_id}
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps(values))
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
