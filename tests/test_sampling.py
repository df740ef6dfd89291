"""Sampling and what comes with it, through ``LLM`` in one process: log-probabilities, several answers, stops, streams."""

from __future__ import annotations

import pytest
import torch
from checkpoints import make_checkpoint, mixed_prompts

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sampling") / "model"
    make_checkpoint(directory, "qwen2-tied")
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), block_size=4, num_kv_blocks=400, max_num_batched_tokens=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(checkpoint):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def demo():
    with LLM(num_kv_blocks=200) as llm:
        yield llm


PROMPTS = mixed_prompts(5)


def test_logprobs_are_transformers(llm, reference):
    params = SamplingParams(max_tokens=8, temperature=1.2, seed=5, logprobs=5, prompt_logprobs=3, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        ids = prompt + output.token_ids
        with torch.no_grad():
            logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        measured = [*output.prompt_logprobs, *output.completions[0].logprobs]
        assert [one.token_id for one in measured] == ids[1:]
        for position, one in enumerate(measured):
            wanted = logprobs[position]
            assert one.logprob == pytest.approx(float(wanted[ids[position + 1]]), abs=1e-4)
            rank = 1 + int((wanted > wanted[ids[position + 1]]).sum()) if position < len(prompt) - 1 else 0
            assert one.rank == rank
            top = wanted.topk(3 if position < len(prompt) - 1 else 5)
            assert list(one.top) == top.indices.tolist()
            assert list(one.top.values()) == pytest.approx(top.values.tolist(), abs=1e-4)


def test_logprobs_are_the_models_own_whatever_the_processors(llm):
    plain, biased = (
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, logprobs=2, logit_bias=bias))[0]
        .completions[0]
        .logprobs[0]
        for bias in ({}, {7: 50.0})
    )
    assert biased.token_id == 7 and biased.top == plain.top


def test_n_answers_are_those_of_n_seeds(llm):
    params = {"max_tokens": 6, "temperature": 1.5, "ignore_eos": True}
    (several,) = llm.generate(PROMPTS[4], SamplingParams(n=3, seed=11, **params))
    alone = [llm.generate(PROMPTS[4], SamplingParams(seed=11 + i, **params))[0].token_ids for i in range(3)]
    assert [completion.token_ids for completion in several.completions] == alone
    assert [completion.index for completion in several.completions] == [0, 1, 2]
    assert several.num_output_tokens == 18


def test_n_answers_share_the_prompts_blocks(checkpoint):
    prompt = list(range(3, 103))
    with LLM(str(checkpoint), block_size=4, num_kv_blocks=60) as llm:
        peak = 0

        def look(delta):
            nonlocal peak
            peak = max(peak, llm.engine.blocks.num_blocks - llm.engine.blocks.num_free)

        llm.generate(prompt, SamplingParams(n=8, max_tokens=4, temperature=1.0, ignore_eos=True), on_delta=look)
    assert peak <= 25 + 8 * 2


def test_best_of_keeps_the_likeliest(llm):
    params = {"max_tokens": 6, "temperature": 1.5, "ignore_eos": True, "logprobs": 0}
    (every,) = llm.generate(PROMPTS[2], SamplingParams(n=6, **params))
    (best,) = llm.generate(PROMPTS[2], SamplingParams(n=2, best_of=6, **params))
    every, best = every.completions, best.completions
    ranked = sorted(every, key=lambda completion: -sum(one.logprob for one in completion.logprobs))
    assert [completion.token_ids for completion in best] == [completion.token_ids for completion in ranked[:2]]
    assert [completion.index for completion in best] == [0, 1]


def test_greedy_with_processors_is_transformers(llm, reference):
    settings = {"repetition_penalty": 1.4, "min_new_tokens": 3, "bad_words_ids": [[17], [3, 4]]}
    ids = torch.tensor([PROMPTS[4]])
    with torch.no_grad():
        expected = reference.generate(
            ids, do_sample=False, max_new_tokens=12, eos_token_id=2, pad_token_id=0, **settings
        )
    request = llm.make_request(0, PROMPTS[4], SamplingParams(max_tokens=12, min_tokens=3, repetition_penalty=1.4))
    from dataclasses import replace

    (output,) = llm.run([replace(request, bad_token_ids=((17,), (3, 4)))])
    assert output.token_ids == expected[0, len(PROMPTS[4]) :].tolist()


def test_stop_token_ends_the_answer_and_stays_out_of_the_text(demo):
    chat = [{"role": "user", "content": "Sort 5, 3, 9."}]
    whole = demo.generate(chat)[0]
    comma = whole.token_ids[1]
    cut = demo.generate(chat, SamplingParams(stop_token_ids=[comma]))[0].completions[0]
    assert (cut.text, cut.token_ids, cut.finish_reason, cut.stop_reason) == ("3", whole.token_ids[:2], "stop", comma)
    kept = demo.generate(chat, SamplingParams(stop_token_ids=[comma], include_stop_str_in_output=True))[0]
    assert kept.text == "3" + demo.tokenizer.decode([comma])


@pytest.mark.parametrize(("include", "text"), [(False, "3, 5"), (True, "3, 5, 9")])
def test_stop_string_may_stay_in_the_text(demo, include, text):
    chat = [{"role": "user", "content": "Sort 5, 3, 9."}]
    done = demo.generate(chat, SamplingParams(stop=(", 9",), include_stop_str_in_output=include))[0].completions[0]
    assert (done.text, done.stop_reason) == (text, ", 9")


def test_stop_strings_wait_for_min_tokens(demo):
    chat = [{"role": "user", "content": "Count from 1 to 9."}]
    done = demo.generate(chat, SamplingParams(stop=(",",), min_tokens=4))[0]
    assert done.text == "1, 2, 3"


def test_bad_word_is_never_said(demo):
    chat = [{"role": "user", "content": "法国的首都是哪里？"}]
    assert "巴" in demo.generate(chat)[0].text
    assert "巴" not in demo.generate(chat, SamplingParams(bad_words="巴", max_tokens=8))[0].text


def test_only_allowed_tokens_are_said(llm):
    output = llm.generate(PROMPTS[1], SamplingParams(allowed_token_ids=[5, 6], max_tokens=10, ignore_eos=True))[0]
    assert set(output.token_ids) <= {5, 6}


def test_streamed_pieces_are_the_text(demo):
    questions = ["你会做什么？", "What is LABInfer?", "从1数到20。"]
    pieces: dict[tuple[int, int], list] = {}
    outputs = demo.generate(
        [[{"role": "user", "content": question}] for question in questions],
        SamplingParams(n=2, temperature=0.5, seed=3, stop=("，写JSON", "parallel")),
        on_delta=lambda delta: pieces.setdefault((delta.key, delta.index), []).append(delta),
    )
    for output in outputs:
        for completion in output.completions:
            got = pieces[output.key, completion.index]
            assert "".join(delta.text for delta in got) == completion.text
            assert [token for delta in got for token in delta.token_ids] == completion.token_ids
            assert [delta.finish_reason for delta in got] == [None] * (len(got) - 1) + [completion.finish_reason]
            assert all("\ufffd" not in delta.text for delta in got)
    assert len(pieces) == 6 and len(outputs) == 3


def test_broken_listener_does_not_break_the_model(llm):
    def listen(delta):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        llm.generate(PROMPTS, on_delta=listen)
    assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=2))) == len(PROMPTS)


def test_best_of_several_cannot_stream(llm):
    with pytest.raises(UserError, match="best_of and num_beams cannot stream"):
        llm.generate(PROMPTS, SamplingParams(best_of=2), on_delta=print)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logits_processors": {"nonsense": 1}}, "unknown logits processor 'nonsense'"),
        ({"logits_processors": {"logit_bias": {10**6: 1}}}, "unknown logits processor 'logit_bias'"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias: token id 1000000 is outside the vocabulary"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: token id -1 is outside"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids: token id"),
    ],
)
def test_what_no_rank_could_do_is_refused_before_it_is_sent(llm, fields, message):
    with pytest.raises(UserError, match=message):
        llm.generate(PROMPTS[0], SamplingParams(**fields))
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))  # and the engine goes on
