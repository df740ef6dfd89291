"""JSONL jobs from end to end: every kind of line in, exactly one line out for each."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from golden import PROMPTS, golden
from launchers import LAUNCH, command, environment, finish, kill_tree, matrix, start
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from labinfer import LLM, SamplingParams

SOME_FAILED = 1


def write_lines(path, lines) -> str:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return str(path)


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def expected_text(model: str, ids: list[int], num_tokens: int) -> str:
    """Transformers' greedy continuation as text, up to an end-of-sequence token."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    out = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).generate(
        torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


@pytest.mark.parametrize(("launcher",), matrix(("mpirun",)))
def test_every_kind_of_line_gets_exactly_one_line(launcher, model, launches, tmp_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    chat = [{"role": "user", "content": "你好"}]
    body = {"model": "m", "messages": chat, "max_tokens": 5}
    lines = [
        {"prompt": "the quick", "max_tokens": 6},
        {"id": "ids", "prompt_token_ids": [5, 6, 7], "max_tokens": 4, "ignore_eos": True},
        {"id": "chat", "messages": chat, "max_tokens": 5},
        {"id": "two", "prompt": "the quick", "max_tokens": 6, "n": 2, "logprobs": 1, "logit_bias": {"9": 0.0}},
        {"custom_id": "c-chat", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {
            "custom_id": "c-text",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "the quick", "max_tokens": 6},
        },
        b"",
        b"{not json",
        {"id": "empty", "prompt": ""},
        {"id": "long", "prompt_token_ids": [5] * 600},
        {"id": "outside", "prompt_token_ids": [5, 512]},
        {"id": "unknown", "prompt": "x", "temprature": 1.0},
        {"custom_id": "c-bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "stream": True}},
        b"\xff\xfe",
    ]
    out = tmp_path / "out.jsonl"
    paths = ["--input", write_lines(tmp_path / "in.jsonl", lines), "--output", out]
    done = launches.run(launcher, 2, "--model", model, *paths, "-pp", "2")
    assert done.returncode == SOME_FAILED, done.text
    records = {record.get("custom_id") or record["id"]: record for record in read_lines(out)}
    assert len(read_lines(out)) == len(records) == len(lines) - 1  # the empty line asks for nothing

    prompt_ids = tokenizer("the quick")["input_ids"]
    text = expected_text(model, prompt_ids, 6)
    assert records[1]["text"] == text
    assert records[1]["usage"]["prompt_tokens"] == len(prompt_ids)
    assert set(records[1]) == {"id", "text", "token_ids", "finish_reason", "usage"}
    assert [choice["text"] for choice in records["two"]["choices"]] == [text, text]
    assert [list(one["top"]) for one in records["two"]["logprobs"]] == [[str(i)] for i in records["two"]["token_ids"]]
    assert len(records["ids"]["token_ids"]) == 4
    assert records["ids"]["finish_reason"] == "length"
    chat_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    chat_text = expected_text(model, chat_ids, 5)
    assert records["chat"]["text"] == chat_text
    response = records["c-chat"]["response"]
    assert response["status_code"] == 200
    assert response["body"]["object"] == "chat.completion"
    message = {"role": "assistant", "content": chat_text, "refusal": None}
    assert response["body"]["choices"][0]["message"] == message
    assert records["c-text"]["response"]["body"]["choices"][0]["text"] == text

    messages = {key: record["error"]["message"] for key, record in records.items() if record.get("error")}
    assert messages["empty"] == "line 9: the prompt is empty; give at least one token"
    assert "600 tokens, and at most 511 leave space for one output token" in messages["long"]
    assert "token id 512 is outside the vocabulary of 512 tokens" in messages["outside"]
    assert "temprature" in messages["unknown"]
    assert {8, 14} <= set(messages), "broken lines are named by their number"
    assert records["c-bad"]["response"]["status_code"] == 400
    assert "stream=True is not supported" in records["c-bad"]["response"]["body"]["error"]["message"]


def test_producer_that_waits_for_answers_gets_them(model):
    """Standard input stays open: each line is answered before the next is asked."""
    process = subprocess.Popen(
        command("mpirun", 2, LAUNCH, "--model", model, "--input", "-", "-pp", "2"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=environment(),
    )
    try:
        for number in range(1, 4):
            process.stdin.write(
                json.dumps({"prompt_token_ids": [number], "max_tokens": number, "ignore_eos": True}) + "\n"
            )
            answer = json.loads(process.stdout.readline())
            assert (answer["id"], len(answer["token_ids"])) == (number, number)
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait(30) == 0
    finally:
        kill_tree(process)


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_signal_while_standard_input_is_open_ends_in_order(signum, model):
    process = subprocess.Popen(
        command("single", 1, LAUNCH, "--model", model, "--input", "-"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=environment(),
    )
    process.stdin.write('{"prompt_token_ids": [5], "max_tokens": 2}\n')
    process.stdout.readline()
    process.send_signal(signum)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signum
    assert "1 finished" in err
    assert "Fatal" not in err


def test_signal_during_a_prompt_run_keeps_the_answers_that_are_finished(model, tmp_path):
    out = tmp_path / "out.jsonl"
    prompts = [argument for number in range(60) for argument in ("--prompt", "a " * number + "b")]
    flags = ["--raw", "--max-tokens", "300", "--ignore-eos", "--max-num-seqs", "2", "--output", out]
    process = start(command("single", 1, LAUNCH, "--model", model, *prompts, *flags, "--log-level", "info"))
    while not (out.exists() and out.stat().st_size > 0):
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = finish(process, 20)
    assert done.returncode == 128 + signal.SIGINT
    assert f"{len(read_lines(out))} finished" in done.stderr


def test_flags_are_defaults_that_lines_override_and_stop_strings_end_texts_before_them(model, launches, tmp_path):
    with LLM(model, threads=1) as llm:
        text = llm.generate("the", SamplingParams(max_tokens=20, ignore_eos=True))[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    lines = [
        {"id": 0, "prompt_token_ids": [5], "ignore_eos": True},
        {"id": 1, "prompt_token_ids": [5], "max_tokens": 2, "ignore_eos": True},
    ]
    out = tmp_path / "out.jsonl"
    paths = ["--input", write_lines(tmp_path / "in.jsonl", lines), "--output", out]
    prompt = ["--prompt", "the", "--raw", "--max-tokens", "20", "--ignore-eos", "--stop", stop]
    flags = ["--max-tokens", "7", "--temperature", "0.9", "--seed", "3"]
    done = launches.run("single", 1, "--model", model, *paths, *flags)
    stopped = launches.run("single", 1, "--model", model, *prompt)
    assert done.returncode == stopped.returncode == 0, done.text + stopped.text
    records = {record["id"]: record["token_ids"] for record in read_lines(out)}
    assert [len(records[0]), len(records[1])] == [7, 2]
    assert records[0][:2] == records[1], "the same seed and prompt"
    assert stopped.stdout.rstrip("\n") == text[: text.index(stop)]


def test_few_kv_blocks_only_make_it_slower_and_the_report_has_every_figure(model, launches, tmp_path):
    lines = [{"id": i, "prompt_token_ids": ids, "max_tokens": 32, "ignore_eos": True} for i, ids in enumerate(PROMPTS)]
    out, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    paths = ["--input", write_lines(tmp_path / "in.jsonl", lines), "--output", out, "--report", report]
    done = launches.run("mpirun", 2, "--model", model, *paths, "-pp", "2", "--num-kv-blocks", "9")
    assert done.returncode == 0, done.text
    assert "preemptions" in done.stderr
    assert {record["id"]: record["token_ids"] for record in read_lines(out)} == dict(
        enumerate(answer[:32] for answer in golden("qwen2-tied").tokens)
    )
    figures = json.loads(report.read_text())
    assert figures["finished"] == len(PROMPTS)
    assert figures["output_tokens"] == 32 * len(PROMPTS)
    assert figures["prompt_tokens"] == sum(map(len, PROMPTS))
    assert len(figures["bubble"]) == len(figures["peak_memory"]) == 2
    for waits, busy, names in zip(
        figures["waits_s"], figures["busy_s"], [{"tokens"}, {"activations", "plans"}], strict=True
    ):
        assert waits.keys() == names
        assert sum(waits.values()) + busy <= figures["wall_s"]
    weights = (Path(model) / "model.safetensors").stat().st_size
    assert all(0 < count < weights for count in figures["weight_bytes_read"]), "each rank reads only its own bytes"
    for word in ("time to first token", "time per output token", "busy", "bubble", "peak memory", "p50", "p99"):
        assert word in done.stderr
