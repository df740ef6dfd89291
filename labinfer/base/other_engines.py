"""Flags and keyword arguments of vLLM, SGLang and llama.cpp: aliases of options here, or hints what to do instead."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from labinfer.base.config import SECTIONS
from labinfer.base.errors import UserError
from labinfer.base.option_fields import flag_name
from labinfer.base.sampling_params import SamplingParams

SAME_OPTIONS = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pipeline_parallel": "pipeline_parallel_size",
}
"""Aliases of options, accepted as flags and as keywords of ``LLM``."""

GPU_LAYERS = "--device cuda, or --device cuda,cpu --layers 14,10 on two ranks"
LORA = "LoRA adapters are not supported; merge the adapter into its model (PEFT's merge_and_unload)"
REPLY_FORMAT = "the format is recognized by the chat template; --response-template NAME sets it where it is not"
EMBEDDINGS = "embeddings need no option"
CAPTURED = "decode steps are captured where the device allows it"
REPLACEMENTS = {
    "-m": "--model",
    "-p": "--prompt",
    "-n": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--n-ctx": "--max-model-len",
    "--context-length": "--max-model-len",
    "-t": "--threads",
    "--n-threads": "--threads",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "--max-batch-size": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs",
    "-ngl": GPU_LAYERS,
    "--n-gpu-layers": GPU_LAYERS,
    "--gpu-layers": GPU_LAYERS,
    "--gpu-memory-utilization": "--memory-utilization",
    "--mem-fraction-static": "--memory-utilization",
    "--num-gpu-blocks-override": "--num-kv-blocks",
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--served-model-name": "--model NAME=DIR",
    "--enable-expert-parallel": "--experts whole",
    "--attention-backend": "--functions paged_attention=NAME",
}
"""Flags of other engines with a similar meaning, each with the flag to use here."""

NEEDLESS = {
    "--trust-remote-code": "the code of a checkpoint is never run",
    "--enforce-eager": "captured steps do not change the tokens",
    "--enable-chunked-prefill": "prompts are always split into chunks, of --chunked-prefill-size tokens at most",
    "--enable-auto-tool-choice": "tool calls are always parsed",
    "--tool-call-parser": REPLY_FORMAT,
    "--reasoning-parser": REPLY_FORMAT,
    "--guided-decoding-backend": "llguidance handles all structured outputs",
    "--structured-outputs-config": "llguidance handles all structured outputs",
    "--runner": EMBEDDINGS,
    "--task": EMBEDDINGS,
    "--compilation-config": CAPTURED,
    "--max-seq-len-to-capture": CAPTURED,
    "--load-format": "the format is recognized by the checkpoint's files; for random weights, tools/random_checkpoint.py writes a checkpoint",
    "--distributed-executor-backend": "torchrun, mpirun or srun starts the ranks",
    "--flash-attn": "the fastest attention is measured at the start",
    "-fa": "the fastest attention is measured at the start",
    "--mmap": "files are always mapped",
    "--no-mmap": "files are always mapped",
}
"""Flags of other engines that have no counterpart here because none is needed, each with the reason."""

UNSUPPORTED = {
    "--enable-lora": LORA,
    "--lora-modules": LORA,
    "--max-lora-rank": LORA,
    "--max-loras": LORA,
    "--data-parallel-size": "a server runs one replica of the model; start one server for each",
    "--limit-mm-per-prompt": "models read text only",
    "--revision": "the hub's default revision is loaded; download another one, and give its directory as --model",
    "--hf-overrides": "config.json is read as it is; change it in a copy of the checkpoint's directory",
}
"""Flags of vLLM for what LABInfer does not do, each with the reason and what to do instead."""

NEAR = 0.8
"""Minimum similarity (``difflib``) at which an unknown word counts as a misspelled option or command. It is high
because the names of all benchmarks share their first word."""
SHORTEST = 3
"""Minimum letters of an abbreviated flag. A word of at most this length is never taken for a typo: too many options are
similar."""


def suggest(flag: str, known: Collection[str]) -> str:
    """Hint for an unknown flag, to append to ``unknown option FLAG``: which flag to use, why none is needed, or what is
    not supported; may be empty.

    Args:
        known: flags of the command.
    """
    if reason := NEEDLESS.get(flag):
        return f"; leave it out: {reason}"
    if reason := UNSUPPORTED.get(flag):
        return f": {reason}"
    near = REPLACEMENTS.get(flag, "")
    if near.partition(" ")[0] not in known:
        near = _nearest(flag, known)
    return f" (did you mean {near}?)" if near else ""


def _nearest(flag: str, known: Collection[str]) -> str:
    """The flag that ``flag`` abbreviates or misspells; empty if there is none, or if there are several."""
    names = {name.lstrip("-"): name for name in known}  # common dashes would make all names similar
    word = flag.lstrip("-")
    candidates = sorted((name for name in names if name.startswith(word)), key=len)  # that ``word`` may abbreviate
    if len(word) < SHORTEST or not all(name.startswith(candidates[0]) for name in candidates):
        candidates = []
    if not candidates and len(word) > SHORTEST:
        candidates = difflib.get_close_matches(word, names, 1, NEAR)
    return names[candidates[0]] if candidates else ""


def read_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Rename aliases among the keyword arguments of ``LLM`` to the options that they stand for, for
    ``EngineOptions.from_flat``.

    Raises:
        UserError: a keyword is not an option but resembles one; or an option is given under two names.
    """
    names = sorted(f.name for section in SECTIONS for f in dataclasses.fields(section))
    values: dict[str, Any] = {}
    for key, value in keywords.items():
        name = SAME_OPTIONS.get(key, key)
        if name in values:
            raise UserError(f"{key} is {name}, which is given too; leave one of them out")
        if name in SamplingParams.__struct_fields__:
            raise UserError(f"{key!r} is no option of the engine; give it to SamplingParams")
        if name not in names and (hint := suggest(flag_name(name), [flag_name(known) for known in names])):
            raise UserError(as_keywords(f"unknown option {key!r}{hint}"))
        values[name] = value
    return values


def as_keywords(message: str) -> str:
    """Rewrite the flags in a message as the keyword arguments of ``LLM``: ``--max-num-seqs 0`` becomes ``max_num_seqs 0``."""
    fields = [f for section in SECTIONS for f in dataclasses.fields(section)]
    names = {flag_name(f.name): f.name for f in fields} | {"--plugin": "plugins"}
    names |= {f.metadata["other_name"]: f.name for f in fields if f.metadata["other_name"]}
    return re.sub(r"(?<![\w-])--?[a-z]+(?:-[a-z]+)*", lambda match: names.get(match[0], match[0]), message)
