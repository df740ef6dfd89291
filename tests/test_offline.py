"""Offline use from end to end, in one process: ``LLM`` as a script has it, and a JSONL job as the command line has it."""

from __future__ import annotations

import json
import logging
import re

import pytest
from checkpoints import make_checkpoint, mixed_prompts, transformers_greedy
from launchers import LAUNCH, run
from transformers import PreTrainedTokenizerFast

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError
from labinfer.cli.commands.loading import announce
from labinfer.comm.spmd.machine import resident_memory
from labinfer.observe.table import format_bytes

SMALL = {"block_size": 4, "num_kv_blocks": 400, "max_num_batched_tokens": 32, "max_num_seqs": 4, "threads": 1}
"""Prompts run in several chunks, and not all at once; one thread, for steps this small."""
CHAT = [{"role": "user", "content": "the lazy dog"}]
TALK = [*CHAT, {"role": "assistant", "content": "你好"}, {"role": "user", "content": "0123"}]
IDS = mixed_prompts(4)
PROMPTS = ["pipeline parallel inference", IDS[1], CHAT, {"prompt": "你好,世界。"}, {"messages": TALK}, IDS[0], IDS[3],
           {"prompt_token_ids": IDS[2], "cache_salt": "mine"}]  # fmt: skip
NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("offline") / "model", "llama-untied")


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return PreTrainedTokenizerFast.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def expected(checkpoint, tokenizer):
    """Of each prompt, its token ids and Transformers' answer."""

    def encode(prompt) -> list[int]:
        if isinstance(prompt, dict):
            prompt = next(prompt[name] for name in ("prompt", "prompt_token_ids", "messages") if name in prompt)
        if isinstance(prompt, str):
            return tokenizer(prompt)["input_ids"]
        if isinstance(prompt[0], dict):
            return tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        return prompt

    ids = [encode(prompt) for prompt in PROMPTS]
    answers = transformers_greedy(checkpoint, ids, NUM_TOKENS)
    return list(zip(ids, [answer["token_ids"] for answer in answers], strict=True))


def test_start_reports_the_memory_of_the_rank_by_its_use(llm, caplog):
    caplog.set_level(logging.INFO, logger="labinfer.cli.commands.loading")
    announce({"model": llm})
    weights, cache = llm.layout.loaded_bytes[0], llm.layout.cache_bytes(llm.place, llm.capacity.sizes.num_blocks, 0)
    line = next(text for text in caplog.messages if text.startswith("memory of rank 0: "))
    assert f": {format_bytes(weights)} of weights, {format_bytes(cache)} for the KV cache (" in line
    rest = re.fullmatch(r".*, ([\d.]+) MiB for the rest of the process", line)
    assert abs(float(rest[1]) * 2**20 + weights - resident_memory()) < 8 << 20


def test_text_ids_and_messages_get_transformers_tokens(llm, expected, tokenizer):
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [(output.prompt_token_ids, output.token_ids) for output in outputs] == expected
    for output in outputs:
        assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)
        assert (output.finish_reason, output.num_output_tokens) == ("length", NUM_TOKENS)
        assert 0 < output.time_to_first_token < output.total_time
    assert llm.report.num_finished == len(PROMPTS)
    assert llm.report.output_tokens == llm.report.generated_tokens == len(PROMPTS) * NUM_TOKENS


def test_outputs_have_the_names_of_vllm(llm, expected, tokenizer):
    outputs = llm.generate(prompts=PROMPTS, sampling_params=GREEDY)
    for prompt, output, (ids, answer) in zip(PROMPTS, outputs, expected, strict=True):
        (completion,) = output.outputs
        assert (completion.text, completion.token_ids, completion.finish_reason) == (output.text, answer, "length")
        assert output.prompt_token_ids == ids
        given = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(given, str):
            assert output.prompt == given
        elif isinstance(prompt, list) and isinstance(prompt[0], dict):
            assert output.prompt == tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    assert [output.prompt is None for output in outputs] == [
        isinstance(prompt, list) and isinstance(prompt[0], int)
        or (isinstance(prompt, dict) and "prompt_token_ids" in prompt)
        for prompt in PROMPTS
    ]  # fmt: skip


def test_outputs_are_in_the_order_of_the_prompts_whoever_ends_first(llm, expected):
    lengths = [NUM_TOKENS - 2 * index for index in range(len(PROMPTS))]
    ended = []
    outputs = llm.generate(
        PROMPTS,
        [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths],
        on_delta=lambda delta: ended.append(delta.key) if delta.finish_reason else None,
    )
    assert [output.token_ids for output in outputs] == [
        answer[:length] for (_, answer), length in zip(expected, lengths, strict=True)
    ]
    assert sorted(ended) == list(range(len(PROMPTS))) != ended


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_one_prompt_need_not_be_in_a_list(llm, expected, index):
    (output,) = llm.generate(PROMPTS[index], GREEDY)
    assert (output.prompt_token_ids, output.token_ids) == expected[index]


def test_no_prompts_no_outputs_and_without_params_the_defaults(llm):
    assert llm.generate([]) == []
    (output,) = llm.generate("the quick")
    assert output.finish_reason == "stop" or output.num_output_tokens == SamplingParams().max_tokens


def test_streams_come_side_by_side_and_make_the_texts(llm):
    params = [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=seed) for seed in range(len(PROMPTS))]
    deltas = []
    streamed = llm.generate(PROMPTS, params, on_delta=deltas.append)
    plain = llm.generate(PROMPTS, params)
    for key, (output, same) in enumerate(zip(streamed, plain, strict=True)):
        mine = [delta for delta in deltas if delta.key == key]
        assert "".join(delta.text for delta in mine) == output.text == same.text
        assert sum((delta.token_ids for delta in mine), []) == output.token_ids == same.token_ids
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [output.finish_reason]
    changes = sum(before.key != after.key for before, after in zip(deltas, deltas[1:], strict=False))
    assert changes > 2 * len(PROMPTS), "the streams came one after another"


def test_later_calls_find_earlier_prompts_and_another_llm_begins_anew(checkpoint, expected):
    ids, answers = zip(*expected, strict=True)
    for _ in range(2):
        with LLM(str(checkpoint), **SMALL) as llm:
            first = llm.generate(ids[1], GREEDY)[0]
            assert (first.num_cached_tokens, first.token_ids) == (0, answers[1])
            again = llm.generate([ids[1], ids[1] + answers[1]], GREEDY)
            found = [len(ids[1]) - 1, len(ids[1]) + NUM_TOKENS - 1]
            assert [output.num_cached_tokens for output in again] == [count // 4 * 4 for count in found]
            assert again[0].token_ids == answers[1]
            salted = llm.generate({"prompt_token_ids": ids[1], "cache_salt": "other"}, GREEDY)[0]
            assert (salted.num_cached_tokens, salted.token_ids) == (0, answers[1])


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, GREEDY, "rank 0 needs prompts"),
        (["fine", ""], GREEDY, "prompt 1: the prompt is empty"),
        (["fine", []], GREEDY, "prompt 1: the prompt is empty"),
        (["fine", [5, 512]], GREEDY, "prompt 1: token id 512 is outside the vocabulary of 512 tokens"),
        (
            ["fine", [5] * 600],
            GREEDY,
            "prompt 1: This model.s .* has 600 tokens, and at most 511 leave space for one output token",
        ),
        (["fine", 5], GREEDY, "prompt 1: a prompt must be a string, a list of token ids or a list of messages, not 5"),
        (["fine", {"text": "x"}], GREEDY, "prompt 1: a prompt has no key 'text'; its keys are prompt, "),
        ([{"prompt": "x", "messages": CHAT}], GREEDY, "prompt 0: a prompt needs exactly one of"),
        ([{"prompt": "x", "cache_salt": 7}], GREEDY, "prompt 0: cache_salt must be a string, not 7"),
        (5, GREEDY, "prompts must be one prompt or a list of prompts, not 5"),
        (
            ["fine"],
            {"max_tokens": 3},
            "sampling_params must be SamplingParams, one for all prompts or a list of them, not {",
        ),
        (["fine"], [{"max_tokens": 3}], "sampling_params must be SamplingParams"),
        (["one", "two"], [GREEDY], "1 sampling parameters for 2 prompts"),
        (["fine"], SamplingParams(allowed_token_ids=[512]), "prompt 0: allowed_token_ids: token id 512 is outside"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(llm, expected, prompts, params, message):
    report = llm.report
    with pytest.raises(UserError, match=message):
        llm.generate(prompts, params)
    assert llm.report is report, "something ran"
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected[0][1]


def test_wrong_options_are_refused_by_name(checkpoint):
    with pytest.raises(UserError, match="unknown option 'max_seqs' .did you mean max_num_seqs"):
        LLM(str(checkpoint), max_seqs=4)
    with pytest.raises(UserError, match="^batch_policy eager: choose one of auto, balanced"):
        LLM(str(checkpoint), batch_policy="eager")
    with pytest.raises(UserError, match="^response_template hermit is neither a file nor a built-in template"):
        LLM(checkpoint, response_template="hermit")
    with pytest.raises(UserError, match="^model no-such-model/at-all was not found") as caught:
        LLM("no-such-model/at-all")
    assert len(caught.traceback) == 2 and caught.value.__suppress_context__  # a script shows no more than its own call


def test_job_has_exactly_one_line_for_each_line(checkpoint, expected, tmp_path):
    """More lines than run at once, good and bad ones in turn; ids may come twice."""
    bad = [b"{", b"[]", b'{"id": "bad", "prompt": ""}', b'{"id": "bad", "prompt": "x", "max_tokens": -1}', b"\xff"]
    lines, wanted = [], {}
    for index in range(40):
        if index % 4 == 3:
            lines.append(bad[index // 4 % len(bad)])
            continue
        ids, answer = expected[index % len(expected)]
        count = 1 + index % NUM_TOKENS
        wanted[index] = answer[:count]
        lines.append(
            json.dumps({"id": index, "prompt_token_ids": ids, "max_tokens": count, "ignore_eos": True}).encode()
        )
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines))  # the last line may lack its end
    flags = ["--block-size", "4", "--num-kv-blocks", "60", "--max-num-seqs", "4", "--threads", "1"]
    done = run("single", 1, LAUNCH, "--model", checkpoint, "--input", source, "--output", out, *flags)
    assert done.returncode == 1, done.text  # some lines failed
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(records) == len(lines)
    assert {record["id"]: record["token_ids"] for record in records if "token_ids" in record} == wanted
    errors = [record["error"]["message"] for record in records if record.get("error")]
    assert len(errors) == len(lines) - len(wanted) == 10
    assert sum("the prompt is empty" in message for message in errors) == 2
    assert "10 of 40 lines failed" in done.stderr
