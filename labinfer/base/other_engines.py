"""Options of vLLM, SGLang and llama.cpp: those that mean the same here, and what to use in place of others."""

from __future__ import annotations

import difflib
from collections.abc import Collection

SAME_OPTIONS = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pipeline_parallel": "pipeline_parallel_size",
}
"""Other names of options with the same meaning, accepted as flags and as keywords of ``LLM``."""

DTYPE_SPELLINGS = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
"""Other names of dtypes."""

GPU_LAYERS = "--device cuda, or --device cuda,cpu --layers 14,10 on two ranks"
REPLY_FORMAT = "--response-template NAME, where the checkpoint's chat template does not show the format"
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
    "--tool-call-parser": REPLY_FORMAT,
    "--reasoning-parser": REPLY_FORMAT,
}
"""Flags of other engines with a like meaning, and the flags here."""

NEEDLESS = {
    "--trust-remote-code": "the code of a checkpoint is never run",
    "--enforce-eager": "captured steps give the same tokens",
    "--enable-chunked-prefill": "prompts are always split into chunks, of --chunked-prefill-size tokens at most",
    "--enable-auto-tool-choice": "tool calls are always parsed",
    "--load-format": "the format is recognized by the checkpoint's files",
    "--distributed-executor-backend": "torchrun, mpirun or srun starts the ranks",
    "--flash-attn": "the fastest attention is measured at the start",
    "-fa": "the fastest attention is measured at the start",
    "--mmap": "files are always mapped",
    "--no-mmap": "files are always mapped",
}
"""Flags of other engines that nothing corresponds to, and why."""

LOADED_QUANTIZATIONS = ("awq", "gptq", "fp8", "compressed-tensors", "mxfp4", "gguf", "bitsandbytes", "marlin")
"""Beginnings of values of vLLM's ``--quantization`` that name the format of a checkpoint."""

NEAR = 0.8
"""Similarity (``difflib``) of a word to an option or a command from which on it counts as a typo. It is high, as all benchmarks share
their first word."""
SHORTEST = 3
"""Minimum letters of an abbreviation. For words up to this length no typo is guessed, as too many options are similar."""


def suggest(flag: str, known: Collection[str]) -> str:
    """Hint for an unknown flag, to follow ``unknown option FLAG``: what to give in its place, or why to leave it out; may be empty.

    Args:
        known: flags of the command.
    """
    if reason := NEEDLESS.get(flag):
        return f"; leave it out: {reason}"
    near = REPLACEMENTS.get(flag, "")
    if near.partition(" ")[0] not in known:
        near = _nearest(flag, known)
    return f" (did you mean {near}?)" if near else ""


def _nearest(flag: str, known: Collection[str]) -> str:
    """The flag that ``flag`` abbreviates or misspells; empty if there is none, or several."""
    names = {name.lstrip("-"): name for name in known}  # common dashes would make all names similar
    word = flag.lstrip("-")
    candidates = sorted((name for name in names if name.startswith(word)), key=len)  # that ``word`` may abbreviate
    if len(word) < SHORTEST or not all(name.startswith(candidates[0]) for name in candidates):
        candidates = []
    if not candidates and len(word) > SHORTEST:
        candidates = difflib.get_close_matches(word, names, 1, NEAR)
    return names[candidates[0]] if candidates else ""
