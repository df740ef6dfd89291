"""Runs on every rank of a launch on make-believe cards: what a decode step copies and waits for.

``python device_steps_driver.py JOB``, where JOB is JSON: ``options`` of the engine, ``samplings`` with the parameters of each sequence
(``max_tokens`` as a value is the number of tokens), and a ``folder``, to which each rank that has cards writes ``RANK.json``: the events of one decode
step by kind and Python line, and its ``kernels``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.comm.group.failure import end_group_on_uncaught
from labinfer.comm.group.rank_group import join_group
from labinfer.comm.spmd.environment import detect

PROMPT = [5, 6, 7, 8, 9]
FEW, MANY = 8, 24
"""Tokens of two answers, whose difference is made in decode steps alone."""


def main() -> None:
    job = json.loads(sys.argv[1])
    group = join_group(detect(), EngineOptions())
    end_group_on_uncaught(group)
    llm = LLM.from_options(group, EngineOptions.from_flat(job["options"]))
    cards = torch.get_device_module() if torch.accelerator.is_available() else None
    events, kernels = [], []
    for num_tokens in (FEW, FEW, MANY):  # the first run makes what later ones keep
        before, kernels_before = (Counter(cards.counts.events), cards.num_kernels()) if cards else (Counter(), 0)
        llm.generate([PROMPT] * len(job["samplings"]), [read(fields, num_tokens) for fields in job["samplings"]])
        if cards:
            events.append(cards.counts.events - before)
            kernels.append(cards.num_kernels() - kernels_before)
    if cards:
        steps, found = MANY - FEW, {}
        for (kind, line), number in (events[2] - events[1]).items():
            found.setdefault(kind, {})[line] = number / steps
        found["kernels"] = (kernels[2] - kernels[1]) / steps
        (Path(job["folder"]) / f"{group.rank}.json").write_text(json.dumps(found))
    group.close()


def read(sampling: dict, num_tokens: int) -> SamplingParams:
    """Parameters of an answer of ``num_tokens`` tokens."""
    fields = {"ignore_eos": True} | sampling
    fields = {name: num_tokens if value == "max_tokens" else value for name, value in fields.items()}
    bias = {int(token_id): value for token_id, value in fields.pop("logit_bias", {}).items()}
    return SamplingParams(max_tokens=num_tokens, logit_bias=bias, **fields)


if __name__ == "__main__":
    main()
