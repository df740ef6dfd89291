"""Beam search through ``LLM`` in one process, against Transformers in fp32."""

from __future__ import annotations

import pytest
import torch
from checkpoints import make_checkpoint, mixed_prompts
from transformers import AutoModelForCausalLM

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError

PROMPTS = mixed_prompts(6)
ENDS = list(range(2, 26))
"""Of a model with random weights, so that many beams end."""
CASES = [
    {"num_beams": 2},
    {"num_beams": 4, "length_penalty": 0.0},
    {"num_beams": 5, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 4, "length_penalty": -1.0, "early_stopping": "never"},
    {"num_beams": 3, "length_penalty": 1.5, "early_stopping": "never"},
    {"num_beams": 8, "repetition_penalty": 1.3, "min_tokens": 5},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("beams") / "model", "qwen2-tied")


@pytest.fixture(scope="module")
def reference(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@torch.no_grad()
def transformers_beams(reference, prompt, case, ends, num_tokens) -> list[tuple[list[int], float]]:
    """Answers without padding, and their scores."""
    settings = dict(case)
    if "min_tokens" in settings:
        settings["min_new_tokens"] = settings.pop("min_tokens")
    out = reference.generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        do_sample=False,
        num_return_sequences=case["num_beams"],
        eos_token_id=ends or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    answers = []
    for row, beams, score in zip(out.sequences, out.beam_indices, out.sequences_scores.tolist(), strict=True):
        length = int((beams >= 0).sum())
        answers.append((row[len(prompt) : len(prompt) + length].tolist(), score))
    return answers


def beams_of(output) -> list[tuple[list[int], float]]:
    return [
        (completion.token_ids, pytest.approx(completion.score or 0.0, rel=1e-5, abs=1e-4))
        for completion in output.completions
    ]


def wanted(case, **more) -> SamplingParams:
    return SamplingParams(max_tokens=16, n=case["num_beams"], **case, **more)


@pytest.mark.parametrize("num_prompts", [3, pytest.param(len(PROMPTS), marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_beams_are_those_of_transformers(checkpoint, reference, case, num_prompts):
    prompts = PROMPTS[:num_prompts]
    with LLM(str(checkpoint), block_size=4, num_kv_blocks=900) as llm:
        ending = llm.generate(prompts, wanted(case, stop_token_ids=ENDS, ignore_eos=True))
        endless = llm.generate(prompts, wanted(case, ignore_eos=True))
    for prompt, output in zip(prompts, ending, strict=True):
        assert transformers_beams(reference, prompt, case, ENDS, 16) == beams_of(output)
    for prompt, output in zip(prompts, endless, strict=True):
        assert transformers_beams(reference, prompt, case, [], 16) == beams_of(output)
        assert {completion.finish_reason for completion in output.completions} == {"length"}
    if case.get("length_penalty", 1.0) <= 1.0:  # above, the longest win
        assert any(len(c.token_ids) < 16 and c.finish_reason == "stop" for o in ending for c in o.completions)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_beams_that_give_way_come_to_the_same_answers(checkpoint, mode, caching):
    """Searches beside each other and beside plain requests, with room for little more than the largest alone."""
    params = [
        wanted(CASES[index % 3], ignore_eos=True) if index % 4 else SamplingParams(max_tokens=16, ignore_eos=True)
        for index in range(12)
    ]
    prompts = [*PROMPTS, *mixed_prompts(6, seed=3)]
    with LLM(str(checkpoint), block_size=4, num_kv_blocks=2000) as llm:
        expected = [beams_of(output) for output in llm.generate(prompts, params)]
    options = {"num_kv_blocks": 5 * 22 + 10, "preemption_mode": mode, "swap_space": 0.001 * (mode == "swap")}
    with LLM(str(checkpoint), block_size=4, enable_prefix_caching=caching, max_num_seqs=24, **options) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.report.counts["preemptions"] > 0
        assert (llm.report.counts["swaps"] > 0) == (mode == "swap")
    assert [[(c.token_ids, c.score or 0.0) for c in output.completions] for output in outputs] == expected


def test_beams_share_their_blocks(checkpoint):
    """Eight beams of 100 + 16 tokens would take 232 blocks of 4 on their own."""
    prompt = list(range(3, 103))
    with LLM(str(checkpoint), block_size=4, num_kv_blocks=240, enable_prefix_caching=False) as llm:
        peak = 0

        def look() -> None:
            nonlocal peak
            peak = max(peak, llm.engine.blocks.num_blocks - llm.engine.blocks.num_free)

        request = llm.make_request(0, prompt, SamplingParams(num_beams=8, max_tokens=16, ignore_eos=True))
        (output,) = llm.run([request], check=look)
    assert len(output.completions) == 1
    assert 25 < peak <= 25 + 8 * 4


def test_one_text_per_answer(checkpoint):
    with LLM() as llm:
        chat = [{"role": "user", "content": "What is 17 + 25?"}]
        (output,) = llm.generate(chat, SamplingParams(num_beams=3, n=2, max_tokens=12))
    assert output.text == "42"
    assert [completion.index for completion in output.completions] == [0, 1]
    assert output.completions[0].score > output.completions[1].score


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 2, "n": 3}, "n 3 is more than num_beams 2"),
        ({"num_beams": 2, "temperature": 0.7}, "temperature 0.7 cannot be combined with num_beams"),
        ({"num_beams": 2, "stop": "x"}, "stop .* cannot be combined with num_beams"),
        ({"num_beams": 2, "logprobs": 1}, "logprobs 1 cannot be combined with num_beams"),
        ({"num_beams": 65}, "num_beams 65 is more than max_num_seqs 64"),
        ({"num_beams": 40, "stop_token_ids": ENDS}, "needs 1040 candidate tokens, more than the vocabulary"),
        ({"num_beams": 20, "max_tokens": 300}, r"20 beams of up to 303 tokens need 1520 KV blocks, but there are 400"),
        ({"early_stopping": "sometimes"}, "early_stopping must be true, false or"),
        ({"early_stopping": 1}, "early_stopping must be true, false or"),
    ],
)
def test_what_cannot_be_searched_is_refused(checkpoint, fields, message):
    with LLM(str(checkpoint), block_size=4, num_kv_blocks=400) as llm, pytest.raises(UserError, match=message):
        llm.generate([[5, 6, 7]], SamplingParams(**({"max_tokens": 8} | fields)))


@pytest.mark.parametrize("num_kv_blocks", [66, 70, 80, 90])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_search_that_gives_way_has_its_prompts_log_probabilities_once(checkpoint, num_kv_blocks, mode):
    prompts = [(mixed_prompts(6, seed=4)[1] * 2)[i : i + length] for i, length in enumerate((40, 33, 17, 25, 9, 38))]
    params = SamplingParams(max_tokens=16, num_beams=4, ignore_eos=True, prompt_logprobs=1)
    with LLM(str(checkpoint), block_size=4, num_kv_blocks=900, enable_prefix_caching=False) as llm:
        expected = llm.generate(prompts, params)
    options = {"preemption_mode": mode, "swap_space": 0.001 * (mode == "swap")}
    with LLM(str(checkpoint), block_size=4, num_kv_blocks=num_kv_blocks, max_num_seqs=24, **options) as llm:
        outputs = llm.generate(prompts, params)
    for output, wide in zip(outputs, expected, strict=True):
        assert output.token_ids == wide.token_ids
        assert [one.token_id for one in output.prompt_logprobs] == output.prompt_token_ids[1:]
        assert [one.logprob for one in output.prompt_logprobs] == pytest.approx(
            [one.logprob for one in wide.prompt_logprobs], abs=1e-4
        )


def test_forbidden_tokens_are_no_answers(checkpoint):
    with LLM(str(checkpoint), block_size=4, num_kv_blocks=400) as llm:
        params = SamplingParams(num_beams=4, n=4, allowed_token_ids=[9], max_tokens=5, early_stopping=True)
        (output,) = llm.generate([[5, 6, 7]], params)
        assert [completion.token_ids for completion in output.completions] == [[9] * 5]
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(num_beams=3, max_tokens=1))
        assert output.time_per_output_token == 0 and output.num_output_tokens == 1


def test_search_cannot_stream(checkpoint):
    with LLM(str(checkpoint), block_size=4, num_kv_blocks=400) as llm:
        request = llm.make_request(0, [5, 6, 7], SamplingParams(num_beams=3))
        with pytest.raises(UserError, match="num_beams cannot stream"):
            list(llm.run([request], on_delta=print))
        assert len(llm.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
