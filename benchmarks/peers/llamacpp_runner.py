"""llama.cpp over its C API (llama-cpp-python), with flash attention, a loop that batches as its server does, and one that drafts as its
speculative example does."""

from __future__ import annotations

import argparse
import ctypes
from collections import deque
from pathlib import Path

import llama_cpp as lib
import numpy as np
from harness import Generate, OnToken, run
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
    context, vocabulary = open_context(args.model, args)
    if args.draft_model:
        return make_drafting(context, open_context(args.draft_model, args)[0], vocabulary, args.draft_tokens)
    return make_batching(context, vocabulary)


def open_context(path: Path, args: argparse.Namespace) -> tuple[ctypes.c_void_p, int]:
    """A context over a file, and the size of its vocabulary."""
    params = lib.llama_model_default_params()
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    options = lib.llama_context_default_params()
    options.n_ctx = max(LEAST_CONTEXT, args.context)
    options.n_batch, options.n_ubatch = BATCH_TOKENS, MICRO_BATCH_TOKENS
    options.n_seq_max, options.kv_unified = SEQUENCES, True
    options.n_threads = options.n_threads_batch = args.threads
    options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = lib.llama_init_from_model(model, options) if model else None
    if not context:
        raise RuntimeError(f"llama.cpp could not load {path}; its reason is above")
    return context, lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))


def make_batching(context: ctypes.c_void_p, vocabulary: int) -> Generate:
    """All sequences at once."""
    batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(prompts: list[list[int]], lengths: list[int], on_token: OnToken) -> list[int]:
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
                    on_token()
                    if len(answers[sequence]) < lengths[sequence]:
                        running.append(sequence)
        return [len(answer) for answer in answers]

    return generate


def make_drafting(context: ctypes.c_void_p, draft: ctypes.c_void_p, vocabulary: int, num_drafts: int) -> Generate:
    """One sequence after another, with so many tokens of a draft model in each step."""
    batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def choose(own: ctypes.c_void_p, tokens: list[int], position: int, num_last: int) -> list[int]:
        """The tokens behind the last ones of these, which begin at a position, where the cache of what is behind it is dropped."""
        lib.llama_memory_seq_rm(lib.llama_get_memory(own), 0, position, -1)
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, position + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = row >= len(tokens) - num_last
        if failed := lib.llama_decode(own, batch):
            raise RuntimeError(f"llama_decode answered {failed}")
        rows = range(len(tokens) - num_last, len(tokens))
        shape = (vocabulary,)
        return [int(np.ctypeslib.as_array(lib.llama_get_logits_ith(own, row), shape=shape).argmax()) for row in rows]

    def answer(prompt: list[int], length: int) -> int:
        ids = prompt + choose(context, prompt, 0, 1)
        seen = 0  # tokens in the draft model's cache
        while len(ids) < len(prompt) + length:
            drafted: list[int] = []
            while len(drafted) < min(num_drafts, len(prompt) + length - len(ids) - 1):
                fed = [*ids, *drafted][seen:]
                drafted += choose(draft, fed, seen, 1)
                seen += len(fed)
            chosen = choose(context, [ids[-1], *drafted], len(ids) - 1, 1 + len(drafted))
            accepted = next((i for i, token in enumerate(drafted) if token != chosen[i]), len(drafted))
            ids += chosen[: accepted + 1]
            seen = min(seen, len(ids) - 1)
        return len(ids) - len(prompt)

    def generate(prompts: list[list[int]], lengths: list[int], on_token: OnToken) -> list[int]:
        return [answer(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]

    return generate


if __name__ == "__main__":
    run("llama-cpp-python", load, prepare, can_draft=True)
