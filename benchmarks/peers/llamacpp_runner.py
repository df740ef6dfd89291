"""llama.cpp over its C API (llama-cpp-python), with flash attention and a loop that batches as its server does."""

from __future__ import annotations

import argparse
import ctypes
from collections import deque

import llama_cpp as lib
import numpy as np
from harness import Generate, run
from llamacpp_gguf import write_gguf

FILE_TYPES = {
    "int8": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "int4": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": lib.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
BATCH_TOKENS, MICRO_BATCH_TOKENS, SEQUENCES = 2048, 512, 32
LEAST_CONTEXT = 16384
"""Tokens of all sequences together."""


def prepare(args: argparse.Namespace) -> None:
    """A GGUF file of the checkpoint, quantised by llama.cpp where that is asked."""
    plain = args.model.with_suffix(".bf16")
    write_gguf(args.checkpoint, plain if args.precision in FILE_TYPES else args.model)
    if args.precision in FILE_TYPES:
        params = lib.llama_model_quantize_default_params()
        params.ftype, params.nthread = FILE_TYPES[args.precision], args.threads
        failed = lib.llama_model_quantize(str(plain).encode(), str(args.model).encode(), ctypes.byref(params))
        plain.unlink()
        if failed:
            raise RuntimeError(f"llama_model_quantize answered {failed}")


def load(args: argparse.Namespace) -> Generate:
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    model = lib.llama_model_load_from_file(str(args.model).encode(), params)
    options = lib.llama_context_default_params()
    options.n_ctx = max(LEAST_CONTEXT, args.context)
    options.n_batch, options.n_ubatch = BATCH_TOKENS, MICRO_BATCH_TOKENS
    options.n_seq_max, options.kv_unified = SEQUENCES, True
    options.n_threads = options.n_threads_batch = args.threads
    options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = lib.llama_init_from_model(model, options) if model else None
    if not context:
        raise RuntimeError(f"llama.cpp could not load {args.model}; its reason is above")
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        waiting = deque(
            (sequence, position, token)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        )
        answers: list[list[int]] = [[] for _ in prompts]
        running: list[int] = []  # sequences whose last token is yet to be run
        while waiting or running:
            rows = [
                (sequence, len(prompts[sequence]) + len(answers[sequence]) - 1, answers[sequence][-1])
                for sequence in running
            ]
            while waiting and len(rows) < BATCH_TOKENS:
                rows.append(waiting.popleft())
            batch.n_tokens = len(rows)
            for row, (sequence, position, token) in enumerate(rows):
                batch.token[row], batch.pos[row] = token, position
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                batch.logits[row] = position >= len(prompts[sequence]) - 1
            if failed := lib.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode answered {failed}")
            running = []
            for row, (sequence, position, _) in enumerate(rows):
                if position >= len(prompts[sequence]) - 1:
                    logits_V = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, row), shape=(vocabulary,))
                    answers[sequence].append(int(logits_V.argmax()))
                    if len(answers[sequence]) < lengths[sequence]:
                        running.append(sequence)
        return [len(answer) for answer in answers]

    return generate


if __name__ == "__main__":
    run("llama-cpp-python", load, prepare)
