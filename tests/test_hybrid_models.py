"""Layers with a state and layers of attention in one model, through ``LLM`` in one process, against Transformers in fp32."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from checkpoints import HYBRIDS, MAMBAS, make_checkpoint, transformers_greedy
from golden import BEAM_PROMPTS, BEAMS, PROMPTS, check_answers, golden, greedy, recorded, relative_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError
from labinfer.cli.commands.layout import HEADER, layout_rows

BLOCK = 4
SIX = PROMPTS[:6]
LONG = PROMPTS[1]
"""90 tokens: its last full block before its end ends at 88."""


@pytest.fixture(scope="module")
def checkpoint():
    return golden("qwen3.5").directory


@pytest.fixture(params=[*HYBRIDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MAMBAS)])
def hybrid(request):
    """Gated DeltaNet: dense, with experts, and with projections that are stored by key head. Mamba-2: with and without experts."""
    return golden(request.param)


@pytest.mark.each_value
@pytest.mark.parametrize("chunk", [1, 16, 512])
def test_tokens_and_logits_are_those_of_transformers(hybrid, chunk):
    with recorded(hybrid.directory, chunked_prefill_size=chunk) as (llm, rows):
        check_answers(greedy(llm), rows, hybrid.tokens, hybrid.logits)


@pytest.mark.parametrize("functions", ["reference", "auto"])
def test_bfloat16_is_near_float32(checkpoint, functions):
    """Compiled functions and torch's: the first token's logits of each prompt, as near as Transformers' own bfloat16 comes to them."""
    with recorded(checkpoint, dtype="bfloat16", functions=(functions,)) as (llm, rows):
        greedy(llm, SIX, num_tokens=1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        theirs = [model(torch.tensor([prompt])).logits[0, -1].float() for prompt in SIX]
    expected_PV = golden("qwen3.5").logits[:6, 0]
    errors = [relative_error(rows[tuple(p)].float(), want_V) for p, want_V in zip(SIX, expected_PV, strict=True)]
    their_errors = [relative_error(logits_V, want_V) for logits_V, want_V in zip(theirs, expected_PV, strict=True)]
    assert sum(errors) < 1.5 * sum(their_errors)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_give_logits_like_those_of_float32(checkpoint, quantization):
    """By the cosine between them, on the average of the prompts: weights this random forgive no rounding."""
    with recorded(checkpoint, quantization=quantization) as (llm, rows):
        greedy(llm, SIX, num_tokens=1)
    pairs = [(rows[tuple(p)], want_V) for p, want_V in zip(SIX, golden("qwen3.5").logits[:6, 0], strict=True)]
    cosines = [float(torch.cosine_similarity(got_V, wanted_V, dim=0)) for got_V, wanted_V in pairs]
    assert sum(cosines) / len(cosines) > {"int8": 0.95, "int4": 0.5}[quantization]


# Snapshots.


def test_hit_at_a_snapshot_gives_the_logits_of_computing_it(hybrid):
    """In the same chunks, which end at the snapshot."""
    with recorded(hybrid.directory, enable_prefix_caching=False, chunked_prefill_size=88) as (llm, rows):
        greedy(llm, [LONG], 8)
        computed = dict(rows)
    with recorded(hybrid.directory) as (llm, rows):
        first = greedy(llm, [LONG], 8)[0]
        rows.clear()
        again = greedy(llm, [LONG], 8)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 88)
    assert again.token_ids == first.token_ids and computed.keys() == rows.keys()
    assert max(relative_error(rows[tokens], computed[tokens]) for tokens in rows) < 1e-5


def test_without_the_deepest_snapshot_the_one_before_it_is_taken(hybrid):
    """The keys and values are there, the state at their end is not."""
    with recorded(hybrid.directory, snapshot_interval=32) as (llm, rows):
        expected = greedy(llm, [LONG], 8)[0].token_ids
        tables, wanted = llm.engine.scheduler.tables, dict(rows)
        for left, found in ((88, 88), (87, 64), (63, 32), (31, 0)):  # tokens up to which snapshots stay
            for slot, digest in list(tables.states.slots._digest_of.items()):
                if tables.blocks.find([digest]) and _depth(tables, digest, LONG) > left:
                    tables.states.slots.unregister(slot)
                    tables.states.slots._eviction.use([slot])
                    tables.states.slots._free.append(slot)
            rows.clear()
            output = greedy(llm, [LONG], 8)[0]
            assert (output.num_cached_tokens, output.token_ids) == (found, expected)
            assert max(relative_error(rows[tokens], wanted[tokens]) for tokens in rows) < 1e-5


def _depth(tables, digest: bytes, prompt: list[int]) -> int:
    """Tokens of the prompt up to the block of this digest; of others, more than there are."""
    from labinfer.engine.block_manager import BlockManager

    chain: list[bytes] = []
    BlockManager(0, BLOCK).extend_chain(chain, prompt, "", len(prompt) // BLOCK)
    return BLOCK * (chain.index(digest) + 1) if digest in chain else len(prompt) + 1


def test_snapshots_go_before_a_sequence_waits(checkpoint):
    """As many sequences as there are slots run together, whatever snapshots there were."""
    with recorded(checkpoint, max_num_seqs=3) as (llm, _):
        expected = [output.token_ids for output in greedy(llm, SIX, 8)]
        slots = llm.engine.scheduler.tables.states.slots
        assert slots.num_blocks == 6 and len(slots.evictable) == 3
        again = [output.token_ids for output in greedy(llm, [prompt[::-1] for prompt in SIX] + SIX, 8)]
        assert again[len(SIX) :] == expected and llm.report.counts["preemptions"] == 0


# Preemption and beams.


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_sequences_come_to_the_same_tokens(hybrid, mode):
    swap = {"swap_space": 0.002} if mode == "swap" else {}
    with recorded(hybrid.directory, num_kv_blocks=60, preemption_mode=mode, **swap) as (llm, rows):
        check_answers(greedy(llm), rows, hybrid.tokens, hybrid.logits)
        counts = llm.report.counts
        assert counts["preemptions"] > 0 and (counts["swaps"] > 0) == (mode == "swap")


def test_beams_are_those_of_transformers(hybrid):
    """Also where they begin at a snapshot."""
    with recorded(hybrid.directory) as (llm, _):
        for _ in range(2):
            outputs = llm.generate(BEAM_PROMPTS, SamplingParams(ignore_eos=True, n=BEAMS["num_beams"], **BEAMS))
            assert [[item.token_ids for item in output.completions] for output in outputs] == hybrid.beams
        assert llm.report.counts["found"] > 0


def test_plan_shows_what_a_token_and_a_sequence_take(checkpoint):
    """One layer with 5 heads of 16 keys and values; three with 3 inputs of 560 channels and 10 heads of 32 by 24."""
    with recorded(checkpoint, max_num_seqs=4) as (llm, _):
        (row,) = layout_rows(llm.layout, llm.group.everyone, [1600], [llm.capacity.sizes.num_states])
    assert row[HEADER.index("KV/token") :] == ("640 B", 1600, "109.7 KiB", 8)


def test_context_shift_is_refused(checkpoint):
    with pytest.raises(UserError, match="^context_shift is not supported for this model .recurrent states"):
        LLM(str(checkpoint), context_shift=True, num_kv_blocks=60)


# How checkpoints are published.


@pytest.fixture(scope="module", params=["qwen3.5-pictures", "qwen3.5-moe-pictures"])
def with_pictures(tmp_path_factory, request):
    """With a nested config, the tensors of what sees pictures, and those of a layer that drafts."""
    directory = make_checkpoint(tmp_path_factory.mktemp("pictures") / "model", request.param)
    weights = load_file(directory / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in weights)
    weights |= {"mtp.fc.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(2)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_other_parts_than_the_texts_are_left_out_and_named(with_pictures, caplog):
    references = transformers_greedy(with_pictures, PROMPTS[:3], 16)
    tokens, logits = [r["token_ids"] for r in references], [r["logits"] for r in references]
    with caplog.at_level(logging.INFO, "labinfer"), recorded(with_pictures) as (llm, rows):
        check_answers(greedy(llm, PROMPTS[:3], 16), rows, tokens, logits)
    (line,) = [record.message for record in caplog.records if "not loaded" in record.message]
    assert "tensors of model.visual and mtp are not loaded" in line


def test_text_model_may_have_the_names_of_the_whole(with_pictures, tmp_path):
    """As ``save_pretrained`` writes a text model that was loaded from a checkpoint of the whole."""
    reference = AutoModelForCausalLM.from_pretrained(with_pictures, dtype=torch.float32)
    reference.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((with_pictures / "tokenizer.json").read_bytes())
    names = load_file(tmp_path / "model.safetensors").keys()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].endswith("ForCausalLM")
    assert all(name.startswith("model.language_model.") for name in names - {"lm_head.weight"})
    references = transformers_greedy(with_pictures, PROMPTS[:2], 8)
    tokens, logits = [r["token_ids"] for r in references], [r["logits"] for r in references]
    with recorded(tmp_path) as (llm, rows):
        check_answers(greedy(llm, PROMPTS[:2], 8), rows, tokens, logits)
