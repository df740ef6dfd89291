"""Drafted tokens and resumed requests through ``LLM`` in one process: every answer is that of a run without them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from checkpoints import VOCAB, make_checkpoint, mixed_prompts
from drafting import draft_with

from labinfer import LLM, SamplingParams, StructuredOutputs
from labinfer.base.errors import UserError
from labinfer.engine.sequence import Sequence
from labinfer.requests.outputs import RequestOutput

PARAMS = [
    SamplingParams(max_tokens=18, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=20, temperature=1.1, top_p=0.9, seed=4, repetition_penalty=1.2, logprobs=0),
    SamplingParams(max_tokens=16, temperature=0.8, seed=5, n=2, min_tokens=6, frequency_penalty=0.7, logprobs=1),
    SamplingParams(max_tokens=24, temperature=1.3, seed=6, stop=("e", "a"), min_tokens=5),
    SamplingParams(
        max_tokens=24, temperature=1.3, seed=7, structured_outputs=StructuredOutputs(regex="([a-z]+ ){4,}!")
    ),
    SamplingParams(max_tokens=12, num_beams=3, n=2, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0.9, seed=8, ignore_eos=True, max_context_len=44),
    SamplingParams(max_tokens=14, prompt_logprobs=1, logprobs=1, stop_token_ids=tuple(range(5, 200, 7))),
    SamplingParams(
        max_tokens=20, temperature=0.7, top_k=20, bad_words=("a",), presence_penalty=1.0, seed=9, logprobs=0
    ),
]
PROMPTS = [prompt[:36] for prompt in [*mixed_prompts(), *mixed_prompts(seed=2)][: len(PARAMS)]]

OPTIONS = {"block_size": 4, "context_shift": True, "keep": 3, "threads": 1}
WINDOWS = (0, 9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("drafts") / "model", "llama-untied")


@pytest.fixture(scope="module")
def alone(checkpoint) -> dict[int, list[RequestOutput]]:
    """By window, the answers to each request, one after another with nothing in the cache."""
    answers = {}
    for window in WINDOWS:
        options = {"sliding_window": window} if window else {}
        with LLM(str(checkpoint), num_kv_blocks=400, enable_prefix_caching=False, **OPTIONS, **options) as llm:
            answers[window] = [
                llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)
            ]
    return answers


@dataclass
class AnswerProposer:
    """Drafts what the answers are known to be, some tokens of it wrong."""

    outputs: list[RequestOutput]
    draw: random.Random
    share: float

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        return list(map(self._propose, sequences, limits))

    def forget(self, sequences: list[Sequence]) -> None:
        pass

    def _propose(self, sequence: Sequence, limit: int) -> list[int]:
        begin = sequence.num_output_tokens
        answer = self.outputs[sequence.request.key].completions[sequence.choice].token_ids
        right = answer[begin : begin + self.draw.randint(1, min(limit, 7))]
        return [token if self.draw.random() < self.share else self.draw.randrange(VOCAB) for token in right]


def assert_logprobs_agree(ours, theirs) -> None:
    assert (ours is None) == (theirs is None)
    for one, other in zip(ours or (), theirs or (), strict=True):
        assert (one.token_id, list(one.top)) == (other.token_id, list(other.top))
        expected = pytest.approx([other.logprob, *other.top.values()], rel=1e-4, abs=1e-4)
        assert [one.logprob, *one.top.values()] == expected


def assert_same(ours: RequestOutput, theirs: RequestOutput) -> None:
    for answer, expected in zip(ours.completions, theirs.completions, strict=True):
        assert answer.token_ids == expected.token_ids
        assert (answer.finish_reason, answer.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert answer.text == expected.text
        assert_logprobs_agree(answer.logprobs, expected.logprobs)
    assert_logprobs_agree(ours.prompt_logprobs, theirs.prompt_logprobs)


@pytest.mark.each_value
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 400},
        {"num_kv_blocks": 40, "preemption_mode": "recompute", "enable_prefix_caching": False},
        {"num_kv_blocks": 40, "preemption_mode": "swap", "swap_space": 0.001, "chunked_prefill_size": 5},
        {"num_kv_blocks": 400, "sliding_window": 9, "max_inflight": 3, "batch_policy": "greedy"},
    ],
    ids=["cached", "recompute", "swap", "window"],
)
def test_answers_do_not_depend_on_drafts(checkpoint, alone, options, share):
    outputs = alone[options.get("sliding_window", 0)]
    with LLM(str(checkpoint), **OPTIONS, **options) as llm:
        draft_with(llm, AnswerProposer(outputs, random.Random(0), share))
        for _ in range(2):  # the second run finds blocks of the first
            found = llm.generate(PROMPTS, PARAMS)
            for ours, theirs in zip(found, outputs, strict=True):
                assert_same(ours, theirs)
            counts = llm.report.counts
            assert counts["drafted"] > 60
            assert counts["accepted"] > 0 or share == 0.0
            assert counts["preemptions"] > 0 or options["num_kv_blocks"] > 40
            assert share < 1.0 or counts["accepted"] == counts["drafted"]


RESUMABLE = [
    index for index, params in enumerate(PARAMS) if params.num_choices == params.num_beams == 1 and not params.stop
]


def test_resumed_requests_go_on_as_if_they_had_never_stopped(checkpoint, alone):
    """At every place of every answer."""
    with LLM(str(checkpoint), num_kv_blocks=400, **OPTIONS) as llm:
        requests, expected = [], {}
        for index in RESUMABLE:
            (answer,) = alone[0][index].completions
            whole = llm.make_request(index, PROMPTS[index], PARAMS[index])
            for cut in range(1, len(answer.token_ids)):
                key = (index, cut)
                requests.append(replace(whole, key=key, output_token_ids=tuple(answer.token_ids[:cut])))
                llm.engine.check_request(requests[-1])
                expected[key] = answer
        outputs = {output.key: output for output in llm.run(requests)}
        assert outputs.keys() == expected.keys()
        for (_, cut), output in sorted(outputs.items()):
            answer, (resumed,) = expected[output.key], output.completions
            assert resumed.token_ids == answer.token_ids[cut:], output.key
            assert (resumed.finish_reason, resumed.stop_reason) == (answer.finish_reason, answer.stop_reason)
            assert_logprobs_agree(resumed.logprobs, answer.logprobs and answer.logprobs[cut:])


GUIDED = StructuredOutputs(regex="[a-z]{3}")


@pytest.mark.parametrize(
    ("params", "tokens", "says"),
    [
        (SamplingParams(max_tokens=3), (5, 6, 7), "has 3 tokens, but at most 3 may be generated"),
        (SamplingParams(stop_token_ids=(6,)), (5, 6), "has token 6, which ends the output"),
        (SamplingParams(), (5, 10**6), "token id 1000000 is outside the vocabulary"),
        (SamplingParams(n=2, temperature=1.0), (5,), "a single output"),
        (SamplingParams(num_beams=2, max_tokens=9), (5,), "a single output"),
        (SamplingParams(structured_outputs=GUIDED), (0,), "violate structured_outputs: token 0 at position 0"),
    ],
    ids=["length", "stop", "vocabulary", "n", "beams", "form"],
)
def test_resumed_request_that_cannot_go_on_is_refused(checkpoint, params, tokens, says):
    with LLM(str(checkpoint), num_kv_blocks=40, block_size=4) as llm:
        request = replace(llm.make_request(0, [7, 8, 9], params), output_token_ids=tokens)
        with pytest.raises(UserError, match=says):
            llm.engine.add_request(request)
        assert not llm.engine.has_work


def test_resumed_answer_that_is_complete_is_refused(checkpoint):
    with LLM(str(checkpoint), num_kv_blocks=40, block_size=4) as llm:
        params = SamplingParams(structured_outputs=GUIDED)
        request = llm.make_request(0, [7, 8, 9], params)
        tokens = tuple(llm.tokenizer.encode("abc", add_special_tokens=False))
        with pytest.raises(UserError, match="already complete"):
            llm.engine.add_request(replace(request, output_token_ids=tokens))


def test_resumed_answer_that_is_longer_than_the_context_goes_on(checkpoint):
    with LLM(str(checkpoint), num_kv_blocks=40, block_size=4, max_model_len=16, context_shift=True) as llm:
        request = llm.make_request(0, [7, 8, 9], SamplingParams(max_tokens=40, ignore_eos=True))
        (output,) = llm.run([replace(request, output_token_ids=(5,) * 30)])
        assert len(output.token_ids) == 10 and output.finish_reason == "length"
