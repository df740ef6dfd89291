"""Requests of every kind that drafts must leave as they are, and their answers for comparison."""

from __future__ import annotations

import json

import msgspec

from labinfer import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
KINDS = {
    "greedy": {"max_tokens": 20, "ignore_eos": True},
    "sampled": {"max_tokens": 20, "temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    "penalties": {
        "max_tokens": 20,
        "temperature": 0.7,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "min_tokens": 4,
    },
    "bias": {"max_tokens": 16, "temperature": 0.8, "logit_bias": {5: 4.0, 7: -90.0}, "bad_words": ["a"]},
    "several": {"max_tokens": 14, "temperature": 0.9, "n": 2},
    "form": {"max_tokens": 24, "temperature": 0.9, "structured_outputs": {"json": SCHEMA}},
    "stop": {"max_tokens": 24, "temperature": 1.1, "stop": ["e", "a"], "min_tokens": 3, "stop_token_ids": [11, 12, 13]},
    "context end": {"max_tokens": 60, "temperature": 0.9, "ignore_eos": True, "max_context_len": 44},
    "beams": {"max_tokens": 8, "num_beams": 2, "n": 2, "ignore_eos": True},
    "left out": {"max_tokens": 16, "speculate": False},
}
NUM_REQUESTS, NUM_ALL = 20, 500


def make_requests(prompts: list, count: int) -> tuple[list, list[SamplingParams]]:
    """So many requests of all kinds in turn; half of the prompts, which are texts or token ids, repeat themselves."""
    chosen, params = [], []
    for index, fields in zip(range(count), list(KINDS.values()) * count, strict=False):
        prompt = prompts[index % len(prompts)]
        chosen.append(prompt[:16] * 2 if index % 2 else prompt[:36])
        params.append(msgspec.convert(fields | {"seed": index}, SamplingParams))
    return chosen, params


def tell(outputs) -> str:
    """All of the answers that must be the same, for comparison."""
    return json.dumps(
        [
            [(answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason) for answer in output.completions]
            for output in outputs
        ]
    )
