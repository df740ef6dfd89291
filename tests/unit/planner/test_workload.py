"""Workloads from the traces that there are."""

from __future__ import annotations

import re

import pytest

from labinfer.base.errors import UserError
from labinfer.planner.workload import RequestLengths, Workload, read_workload


def write(tmp_path, text: str) -> str:
    path = tmp_path / "workload"
    path.write_text(text)
    return str(path)


def test_azure_trace_is_read(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    first, second = read_workload(write(tmp_path, text)).requests
    assert first == RequestLengths(prompt=374, output=44, arrival=0.0)
    assert (second.prompt, second.output) == (396, 109)
    assert second.arrival == pytest.approx(4.314579, abs=1e-6)


def test_azure_trace_of_2024_with_a_time_zone_is_read(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,10,2\n2024-05-10 00:00:01.5+00:00,9,1\n"
    assert read_workload(write(tmp_path, text)).requests[1].arrival == pytest.approx(1.49007)


def test_burst_gpt_trace_is_read_without_failed_requests(tmp_path):
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    text = f"{header}5,0,1.2,ChatGPT,472,18,490,Conversation log\n45,1,0,ChatGPT,100,0,100,Conversation log\n118,2,3,GPT-4,1087,230,1317,API log\n"
    assert read_workload(write(tmp_path, text)).requests == (
        RequestLengths(prompt=472, output=18, arrival=0.0),
        RequestLengths(prompt=1087, output=230, arrival=113.0),
    )


def test_mooncake_trace_is_read_with_its_blocks(tmp_path):
    text = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}\n'
    text += '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2366]}\n'
    first, second = read_workload(write(tmp_path, text)).requests
    assert first == RequestLengths(prompt=6955, output=52, arrival=0.0, hash_ids=(46, 47, 2353))
    assert second.arrival == pytest.approx(3.053)


def test_lines_may_be_empty(tmp_path):
    text = '\n \n{"prompt_tokens": 5, "output_tokens": 2}\n\n'
    assert read_workload(write(tmp_path, text)).requests == (RequestLengths(prompt=5, output=2),)


def count_words(line: str) -> int:
    """Words of the prompt in a line of JSON."""
    return len(re.search(r'"prompt": "([^"]*)"', line)[1].split())


def test_line_of_a_job_that_is_refused_is_named(tmp_path):
    def refuse(line: str) -> int:
        raise UserError("it has no words")

    with pytest.raises(UserError, match="workload:1: it has no words"):
        read_workload(write(tmp_path, '{"prompt": "a"}\n'), 50, refuse)


def test_lines_of_a_job_are_counted_and_take_the_default_output(tmp_path):
    text = (
        '{"prompt": "a b c"}\n\n{"body": {"prompt": "a", "max_tokens": 7}}\n{"prompt_tokens": 9, "output_tokens": 4}\n'
    )
    workload = read_workload(write(tmp_path, text), 50, count_words)
    assert [(request.prompt, request.output, request.arrival) for request in workload.requests] == [
        (3, 50, None),
        (1, 7, None),
        (9, 4, None),
    ]


def test_tokens_that_were_found_in_a_cache_are_not_computed(tmp_path):
    text = '{"timestamp": 5000, "prompt_tokens": 40, "cached_tokens": 16, "output_tokens": 2}\n'
    workload = read_workload(write(tmp_path, text + '{"timestamp": 6000, "prompt_tokens": 8, "output_tokens": 2}\n'))
    assert workload.requests[0] == RequestLengths(prompt=40, cached=16, output=2, arrival=0.0)
    assert workload.mean.prompt == 16 and workload.mean.decode_context == pytest.approx((41 + 9) / 2)
    assert workload.mean.prompt_context == pytest.approx((24 * 28 + 8 * 4) / 32)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has the columns of nothing"),
        ("a,b\n1,2\n", "has the columns a, b"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", ":2 is not a row"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16\n", ":2 is not a row"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ('{"input_length": 5, "output_length": 1}\n{"input_length": -5}\n', ":2 is not a request"),
        ('{"prompt": "text"}\n', ":1: prompts are tokenized only by plan --auto without --cluster"),
        ('{"input_length": true}\n', ":1 is not a request"),
        ('{"prompt_tokens": 5, "cached_tokens": 5}\n', ":1 is not a request"),
        ('{"prompt_tokens": 5, "cached_tokens": -1}\n', ":1 is not a request"),
        ('{"input_length"\n', ":1 is not a request"),
    ],
)
def test_file_that_is_no_workload_is_refused_with_the_line(tmp_path, text, problem):
    with pytest.raises(UserError, match=problem) as error:
        read_workload(write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_absent_workload_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read .*nothing: No such file"):
        read_workload(str(tmp_path / "nothing"))


def test_means_count_long_requests_by_their_tokens():
    mean = Workload((RequestLengths(prompt=10, output=2), RequestLengths(prompt=30, output=6))).mean
    assert (mean.prompt, mean.output) == (20, 4)
    assert mean.decode_context == pytest.approx((2 * 11 + 6 * 33) / 8)
    assert mean.prompt_context == pytest.approx((10 * 5 + 30 * 15) / 40)


def test_request_longer_than_the_context_is_refused():
    workload = Workload((RequestLengths(prompt=10, output=2), RequestLengths(prompt=30, output=6)))
    workload.check(36)
    with pytest.raises(UserError, match="30 \\+ 6 tokens, more than the context length of 35"):
        workload.check(35)
