"""Constraints of a request that allow no token: the answer is broken off and says so, however it is generated."""

from __future__ import annotations

import json

import pytest
from checkpoints import make_checkpoint
from mtp_checkpoints import add_mtp

from labinfer import LLM, SamplingParams
from labinfer.api.batch.job import BatchJob
from labinfer.api.batch.job_output import JobOutput
from labinfer.api.batch.options import JobOptions
from labinfer.api.batch.progress import JobProgress
from labinfer.api.batch.reader import JsonlReader
from labinfer.api.batch.recorded_job import RecordedRun
from labinfer.base.errors import UserError

EOS = 2


@pytest.fixture(scope="module")
def demo():
    with LLM(num_kv_blocks=200, threads=1, autotune=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def seven(demo) -> int:
    (token,) = demo.tokenizer.encode("7", add_special_tokens=False)
    return token


def blocked(seven: int, **fields) -> SamplingParams:
    """Nothing but "7", and never "777"."""
    return SamplingParams(**{"max_tokens": 9, "allowed_token_ids": [seven], "bad_words": ["777"]} | fields)


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1.0}, {"logprobs": 2}, {"n": 2, "temperature": 1.0}, {"best_of": 2}], ids=str
)
def test_answer_is_broken_off_where_nothing_is_allowed(demo, seven, fields):
    (output,) = demo.generate(["red"], blocked(seven, **fields))
    for completion in output.completions:
        assert (completion.token_ids, completion.finish_reason) == ([seven] * 2, "abort")
        assert completion.error == (
            "allowed_token_ids and bad_words allow no token after 2 output tokens; leave one of them out"
        )
        assert completion.logprobs is None or len(completion.logprobs) == 2
    assert demo.generate(["red"], SamplingParams(max_tokens=4))[0].finish_reason == "length"


def test_beam_search_without_a_beam_is_broken_off(demo, seven):
    (output,) = demo.generate(["red"], blocked(seven, num_beams=2, n=2))
    assert output.finish_reason == "abort" and "allow no token" in output.error
    (output,) = demo.generate(["red"], blocked(seven, num_beams=2, max_tokens=2))
    assert output.token_ids == [seven] * 2 and not output.error


@pytest.mark.parametrize("speculation", [{"method": "ngram", "num_speculative_tokens": 4}, {"model": "demo-draft"}])
def test_answer_is_broken_off_at_the_same_place_with_drafts(demo, seven, speculation):
    params = [blocked(seven), blocked(seven, min_tokens=4, max_tokens=5), SamplingParams(max_tokens=12)]
    prompts = ["7 7 7 7 7 7 7", "red 7777 7777", "red blue red blue red blue"]
    expected = [(o.token_ids, o.finish_reason, o.error) for o in demo.generate(prompts, params)]
    assert expected[0][1] == "abort"
    with LLM(num_kv_blocks=200, threads=1, autotune=False, speculative_config=speculation) as llm:
        assert [(o.token_ids, o.finish_reason, o.error) for o in llm.generate(prompts, params)] == expected


def test_answer_is_broken_off_with_drafts_of_the_models_own(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "deepseek-v3")
    add_mtp(directory, "deepseek-v3")
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    with LLM(str(directory), block_size=4, num_kv_blocks=400, threads=1, speculative_config=drafts) as llm:
        (token,) = llm.tokenizer.encode("q", add_special_tokens=False)
        params = SamplingParams(max_tokens=9, allowed_token_ids=[token], bad_words=["qqq"])
        (output,) = llm.generate([[5, 9, 4, 5]], params)
        assert (output.token_ids, output.finish_reason) == ([token] * 2, "abort")
        assert len(llm.generate([[5, 9, 4, 5]], SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids) == 5


def test_contradiction_is_refused_before_anything_runs(demo, seven):
    with pytest.raises(UserError, match="which min_tokens 3 forbids"):
        demo.generate(["red"], SamplingParams(allowed_token_ids=[EOS], min_tokens=3))
    with pytest.raises(UserError, match="allowed_token_ids and bad_words together allow no token"):
        demo.generate(["red"], SamplingParams(allowed_token_ids=[seven], bad_words=["7"]))


def run_job(llm: LLM, lines: list[dict], directory, **defaults) -> dict:
    """Output lines of a job by their ids."""
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    output = JobOutput(JobOptions(input=str(source), output=str(target)), {}, {})
    output.begin({}, RecordedRun(llm.fingerprint, {}, str(source)))
    progress, reader = JobProgress("none", llm.clock, None, 0), JsonlReader(str(source), 1 << 20)
    BatchJob(
        reader, output, progress, defaults=SamplingParams(**defaults), model_name="name", fingerprint=llm.fingerprint
    ).run(llm, lambda: None)
    records = map(json.loads, target.read_text().splitlines())
    return {record.get("custom_id") or record["id"]: record for record in records}


def test_line_of_a_job_that_is_broken_off_is_an_error(demo, seven, tmp_path):
    lines = [
        {"id": "a", "prompt": "red", "allowed_token_ids": [seven], "bad_words": ["777"], "max_tokens": 9},
        {"id": "b", "prompt": "red", "max_tokens": 2},
    ]
    by_id = run_job(demo, lines, tmp_path)
    assert "allow no token after 2 output tokens" in by_id["a"]["error"]["message"]
    assert len(by_id["b"]["token_ids"]) == 2


def test_max_tokens_of_a_line_must_fit_in_the_context(demo, tmp_path):
    """The command line's and the Python API's is a bound: the answer ends where the context does."""
    prompt, context = {"prompt_token_ids": [5] * 2040, "ignore_eos": True}, demo.spec.max_model_len
    body = {"prompt": [5] * 2040, "max_tokens": 9}
    lines = [
        {"id": "too many", "max_tokens": 9} | prompt,
        {"id": "less room", "max_tokens": 9, "max_context_len": 2048} | prompt,
        {"id": "fits", "max_tokens": 8} | prompt,
        {"id": "not said"} | prompt,
        {"custom_id": "batch", "method": "POST", "url": "/v1/completions", "body": body},
    ]
    by_id = run_job(demo, lines, tmp_path, max_tokens=100)
    message = (
        f"max_tokens 9 is too large. This model's maximum context length is {context} tokens and your prompt has 2040"
    )
    for name in ("too many", "less room"):
        assert message in by_id[name]["error"]["message"]
    assert by_id["batch"]["response"]["status_code"] == 400
    assert message in by_id["batch"]["response"]["body"]["error"]["message"]
    for name in ("fits", "not said"):
        assert (len(by_id[name]["token_ids"]), by_id[name]["finish_reason"]) == (8, "length")
    (output,) = demo.generate([{"prompt_token_ids": [5] * 2040}], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(output.token_ids) == 8
