"""Embeddings from end to end, in one process: the vectors are those of Transformers, whatever else runs and however."""

from __future__ import annotations

import json
import math

import pytest
import torch
from checkpoints import make_checkpoint, mixed_prompts, transformers_states, worst_vector_error

from labinfer import LLM, SamplingParams
from labinfer.api.batch.job import BatchJob
from labinfer.api.batch.job_output import JobOutput
from labinfer.api.batch.options import JobOptions
from labinfer.api.batch.progress import JobProgress
from labinfer.api.batch.reader import JsonlReader
from labinfer.api.batch.recorded_job import RecordedRun
from labinfer.base.errors import UserError
from labinfer.base.plan import POOLINGS

TOLERANCE = 1e-4
PROMPTS = mixed_prompts()
SMALL = {"block_size": 4, "num_kv_blocks": 400, "threads": 1}
CHAT = [{"role": "user", "content": "the lazy dog"}]


@pytest.fixture(scope="module", params=["qwen2-tied", "llama-untied"])
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("embed") / request.param, request.param)


@pytest.fixture(scope="module")
def states(checkpoint):
    return transformers_states(checkpoint, PROMPTS)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), **SMALL, max_num_batched_tokens=32, max_num_seqs=4) as llm:
        yield llm


def vectors_of(outputs) -> list[list[float]]:
    return [output.embedding for output in outputs]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_vectors_are_those_of_transformers(checkpoint, states, chunk, pooling):
    """Also the second time, when all but the last block of each prompt could be found in the cache."""
    with LLM(str(checkpoint), **SMALL, chunked_prefill_size=chunk, max_num_batched_tokens=96) as llm:
        for again in range(2):
            outputs = llm.embed(PROMPTS, pooling, normalize=False)
            assert [(output.key, output.prompt_token_ids) for output in outputs] == list(enumerate(PROMPTS))
            assert worst_vector_error(vectors_of(outputs), states, pooling) < TOLERANCE
            found = [(len(prompt) - 1) // 4 * 4 if again and pooling == "last" else 0 for prompt in PROMPTS]
            assert [output.num_cached_tokens for output in outputs] == found
        assert (llm.report.num_finished, llm.report.output_tokens) == (len(PROMPTS), 0)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_normalized_vectors_have_length_1_and_point_the_same_way(llm, pooling):
    plain, unit = llm.embed(PROMPTS, pooling, normalize=False), llm.embed(PROMPTS, pooling)
    for vector, same in zip(vectors_of(plain), vectors_of(unit), strict=True):
        assert abs(math.hypot(*vector) - 1) > 0.1
        assert math.hypot(*same) == pytest.approx(1.0, abs=1e-9)
        assert torch.cosine_similarity(torch.tensor(vector), torch.tensor(same), dim=0) > 1 - 1e-6


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_cut_before_they_are_normalized(llm, pooling, normalize):
    whole = torch.tensor(vectors_of(llm.embed(PROMPTS, pooling, normalize=False)))
    cut = torch.nn.functional.normalize(whole[:, :5], dim=1) if normalize else whole[:, :5]
    found = torch.tensor(vectors_of(llm.embed(PROMPTS, pooling, normalize, dimensions=5)))
    assert (found - cut).abs().max() < 1e-5
    width = llm.spec.hidden_size
    for dimensions in (0, width + 1, True, "5"):
        with pytest.raises(UserError, match=f"dimensions {dimensions!r} is not supported: .* choose 1 to {width}$"):
            llm.embed(PROMPTS, pooling, dimensions=dimensions)


def test_prompts_are_cut_to_their_first_tokens(llm):
    text = "the quick brown fox jumps over the lazy dog " * 40
    (short,) = llm.embed("the quick brown fox", truncate_prompt_tokens=100)
    assert short.prompt_token_ids == llm.embed("the quick brown fox")[0].prompt_token_ids
    full = llm.tokenizer.encode(text)
    for cut in (llm.embed(text, truncate_prompt_tokens=9), llm.embed(full, truncate_prompt_tokens=9)):
        assert cut[0].prompt_token_ids == full[:9]
    with pytest.raises(UserError, match="truncate_prompt_tokens must be -1, or from 1 to"):
        llm.embed(text, truncate_prompt_tokens=0)
    assert len(llm.embed((text, full), truncate_prompt_tokens=9)) == 2


@pytest.mark.parametrize("prompts", [CHAT, [CHAT], {"messages": CHAT}], ids=["bare", "listed", "named"])
def test_conversations_are_not_cut(llm, prompts):
    with pytest.raises(UserError, match="truncate_prompt_tokens needs texts or token ids, not messages"):
        llm.embed(prompts, truncate_prompt_tokens=3)


def test_last_token_is_the_default(llm):
    assert vectors_of(llm.embed(PROMPTS)) == vectors_of(llm.embed(PROMPTS, "last"))


def test_text_and_messages_are_embedded_as_their_tokens(llm):
    prompts = ["pipeline parallel inference", CHAT, {"prompt": "你好,世界。", "cache_salt": "mine"}]
    outputs = llm.embed(prompts, "mean")
    again = llm.embed([output.prompt_token_ids for output in outputs], "mean")
    for output, same in zip(outputs, again, strict=True):
        assert output.embedding == pytest.approx(same.embedding, abs=1e-5)
    (alone,) = llm.embed(prompts[0], "mean")
    assert alone.prompt_token_ids == outputs[0].prompt_token_ids
    assert llm.embed([]) == []


@pytest.mark.parametrize(
    ("prompts", "pooling", "message"),
    [
        (None, "last", "rank 0 needs prompts"),
        (["fine", ""], "last", "prompt 1: the prompt is empty"),
        ([[5], [5, 512]], "mean", "prompt 1: token id 512 is outside the vocabulary of 512 tokens"),
        (["fine"], "max", "pooling must be one of last, mean, cls, not 'max'"),
        (["fine"], "", "pooling must be one of last, mean, cls, not ''"),
    ],
)
def test_what_cannot_be_embedded_is_refused_and_the_next_call_is_fine(llm, states, prompts, pooling, message):
    with pytest.raises(UserError, match=message):
        llm.embed(prompts, pooling)
    assert worst_vector_error(vectors_of(llm.embed(PROMPTS[:2], normalize=False)), states[:2], "last") < TOLERANCE


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_prompt_may_fill_the_context(checkpoint, states, pooling, shift):
    """There need be no room for a token after it; the second prompt has 90 tokens."""
    with LLM(str(checkpoint), block_size=4, num_kv_blocks=60, max_model_len=90, context_shift=shift) as llm:
        vectors = vectors_of(llm.embed(PROMPTS[1], pooling, normalize=False))
        assert worst_vector_error(vectors, states[1:2], pooling) < TOLERANCE
        with pytest.raises(UserError, match="context length is 90 tokens. However, your prompt has 91 tokens"):
            llm.embed([PROMPTS[1] + [5]], pooling)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_beside_requests_that_generate_and_preempt_them(checkpoint, states, monkeypatch, pooling, mode):
    """The older requests take the blocks of those that are embedded, in the middle of their prompts."""
    greedy = SamplingParams(max_tokens=40, ignore_eos=True)
    generating, embedded = [PROMPTS[2], PROMPTS[3]], [1, 5, 1, 7]
    with LLM(str(checkpoint), **SMALL) as llm:
        expected = [output.token_ids for output in llm.generate(generating, greedy)]
    swap = {"swap_space": 0.001} if mode == "swap" else {}
    few = SMALL | {"num_kv_blocks": 40, "chunked_prefill_size": 5, "max_num_batched_tokens": 24}
    with LLM(str(checkpoint), **few, **swap, preemption_mode=mode) as llm:
        sequences = []
        add_request = llm.engine.add_request
        monkeypatch.setattr(
            llm.engine, "add_request", lambda *given: sequences.extend(add_request(*given)) or sequences[-1:]
        )
        requests = [llm.make_request(("text", index), prompt, greedy) for index, prompt in enumerate(generating)]
        requests += [
            llm.make_request(("vector", index), PROMPTS[number], SamplingParams(), pooling=pooling)
            for index, number in enumerate(embedded)
        ]
        outputs = {output.key: output for output in llm.run(requests)}
        assert {s.request.pooling for s in sequences if s.num_preemptions} == {pooling}
        assert (llm.report.counts["swaps"] > 0) == (mode == "swap" and pooling == "last")
    assert [outputs["text", index].token_ids for index in range(2)] == expected
    vectors = [outputs["vector", index].embedding for index in range(len(embedded))]
    assert worst_vector_error(vectors, [states[number] for number in embedded], pooling) < TOLERANCE


def test_job_answers_each_line_of_inputs_with_one_line(checkpoint, states, tmp_path):
    """Lines of several inputs and of none that can run, beside one that generates."""

    def line(custom_id: str, **body) -> dict:
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}

    lines = [
        line("all", input=PROMPTS, pooling="mean", model="asked"),
        {"id": "text", "prompt_token_ids": PROMPTS[0], "max_tokens": 5, "ignore_eos": True},
        line("one", input=PROMPTS[2]),
        line("bad id", input=[[5], [512]]),
        line("too many", input="the quick", dimensions=1000),
        line("cut", input=PROMPTS, dimensions=3),
        line("text", input=["the quick", "0123"]),
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with LLM(str(checkpoint), **SMALL, max_num_seqs=3) as llm:
        output = JobOutput(JobOptions(input=str(source), output=str(out)), {}, {})
        output.begin({}, RecordedRun(llm.fingerprint, {}, str(source)))
        progress = JobProgress("none", llm.clock, None, 0)
        reader = JsonlReader(str(source), 1 << 20)
        job = BatchJob(
            reader, output, progress, defaults=SamplingParams(), model_name="name", fingerprint=llm.fingerprint
        )
        job.run(llm, lambda: None)
        texts = [output.embedding for output in llm.embed(["the quick", "0123"])]
    assert (job.num_answered, job.num_failed) == (5, 2)
    records = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
    assert len(records) == len(lines)
    by_id = {record.get("custom_id"): record.get("response") for record in records}
    found = {key: response["body"] for key, response in by_id.items() if response}
    assert len(next(record for record in records if record["id"] == "text")["token_ids"]) == 5
    unit = [torch.nn.functional.normalize(states_TD.mean(dim=0), dim=0)[None] for states_TD in states]
    assert [one["index"] for one in found["all"]["data"]] == list(range(len(PROMPTS)))
    assert worst_vector_error([one["embedding"] for one in found["all"]["data"]], unit, "last") < TOLERANCE
    num_tokens = sum(map(len, PROMPTS))
    assert found["all"]["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (found["all"]["model"], found["one"]["model"]) == ("name", "name")
    last = torch.nn.functional.normalize(states[2][-1:], dim=1)
    assert worst_vector_error([found["one"]["data"][0]["embedding"]], [last], "last") < TOLERANCE
    assert [one["embedding"] for one in found["text"]["data"]] == [pytest.approx(text, abs=1e-5) for text in texts]
    assert "token id 512" in found["bad id"]["error"]["message"] and by_id["bad id"]["status_code"] == 400
    assert "dimensions 1000" in found["too many"]["error"]["message"]
    cut = [torch.nn.functional.normalize(states_TD[-1:, :3], dim=1) for states_TD in states]
    assert worst_vector_error([one["embedding"] for one in found["cut"]["data"]], cut, "last") < TOLERANCE
