"""Windowed layers with KV blocks of their own, through ``LLM`` in one process: the tokens are those of Transformers all the same."""

from __future__ import annotations

import pytest
from checkpoints import SHARED_CACHES
from golden import BEAM_PROMPTS, BEAMS, LONG, PROMPTS, check_answers, golden, greedy, recorded

from labinfer import LLM, SamplingParams

KINDS = ["gpt-oss", "gemma3", "qwen2-windows", "gemma4-tied-values", SHARED_CACHES, "mistral"]
"""Layers that see all tokens and layers with a window of 8, in turn or in runs, some of which read others' caches; in the last one all have
a window."""
FEW = {"max_num_seqs": 8, "max_num_batched_tokens": 100, "chunked_prefill_size": 100}
"""So few sequences that windows take fewer blocks than contexts."""
MANY = {"max_num_seqs": 500}
"""So many that they do not: windowed layers hold all tokens."""


def frees(llm: LLM) -> bool:
    """Whether windowed layers have blocks of their own, and all are free again."""
    windows = llm.engine.scheduler.tables.windows
    return windows is not None and windows.blocks.num_free == windows.blocks.num_blocks


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("chunk", "block_size", "caching"), [(5, 4, True), (5, 16, False), (100, 4, True), (100, 16, True)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logits_are_those_of_transformers(kind, chunk, block_size, caching):
    """Chunks shorter than the window, and one longer than all prompts; the second time most of a prompt is found."""
    options = FEW | {"chunked_prefill_size": chunk, "block_size": block_size, "num_kv_blocks": 400}
    reference = golden(kind)
    with recorded(reference.directory, enable_prefix_caching=caching, **options) as (llm, rows):
        for _ in range(1 + caching):
            rows.clear()
            check_answers(greedy(llm), rows, reference.tokens, reference.logits)
        assert frees(llm) and (llm.report.counts["found"] > 0) == caching


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("kind", KINDS)
def test_preemption_changes_no_token(kind, mode):
    reference, swap = golden(kind), {"swap_space": 0.002} if mode == "swap" else {}
    options = FEW | {"num_kv_blocks": 90, "block_size": 4, "preemption_mode": mode} | swap
    with recorded(reference.directory, **options) as (llm, rows):
        check_answers(greedy(llm), rows, reference.tokens, reference.logits)
        assert frees(llm)
        assert llm.report.counts["preemptions"] > 0 and (llm.report.counts["swaps"] > 0) == (mode == "swap")


def test_beams_are_those_of_transformers():
    options = FEW | {"num_kv_blocks": 400, "block_size": 4}
    with LLM(str(golden("gpt-oss").directory), dtype="float32", **options) as llm:
        outputs = llm.generate(BEAM_PROMPTS, SamplingParams(ignore_eos=True, n=BEAMS["num_beams"], **BEAMS))
        assert frees(llm)
    assert [[item.token_ids for item in output.completions] for output in outputs] == golden("gpt-oss").beams


@pytest.mark.each_value
@pytest.mark.parametrize("context", [40, 12, 8])
@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "int8"}, {"num_kv_blocks": 90}], ids=str)
def test_shifted_contexts_are_those_of_layers_that_hold_all(context, changes):
    """The window reaches over half a context of 8 tokens, but not over that of the others."""
    params = [SamplingParams(max_tokens=70 + index, ignore_eos=True, max_context_len=context) for index in range(8)]
    prompts = [prompt[:7] for prompt in PROMPTS]
    options = {"context_shift": True} | changes
    num_blocks = options.pop("num_kv_blocks", 400)
    directory = str(golden("qwen2-windows").directory)
    answers = []
    for size in (FEW, MANY):
        blocks = num_blocks if size is FEW else 400
        with LLM(directory, dtype="float32", num_kv_blocks=blocks, block_size=4, **options, **size) as llm:
            answers.append([output.token_ids for output in llm.generate(prompts, params)])
            assert frees(llm) == (size is FEW)
    assert answers[0] == answers[1]


def test_long_prompt_holds_its_window_alone():
    with LLM(str(golden("gpt-oss").directory), dtype="float32", num_kv_blocks=400, block_size=4, **FEW) as llm:
        tables, held = llm.engine.scheduler.tables, []
        for _ in llm.stream(PROMPTS[LONG], SamplingParams(max_tokens=20, ignore_eos=True)):
            held += [len(sequence.cache.windowed.in_use) for sequence in llm.engine.scheduler.running]
        assert held and max(held) <= 3 and len(PROMPTS[LONG]) == 90 and tables.is_idle
