"""Benchmarks of the engine: arrivals, statistics, goals, and what their JSON holds. No model: an engine on a clock of ours."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from fake_clock import FakeClock

from labinfer.api.llm import LLM
from labinfer.base.errors import Interrupted, UserError
from labinfer.base.option_fields import check_bounds, convert_section
from labinfer.base.sampling_params import SamplingParams
from labinfer.cli.bench.arrivals import Arrivals, arrival_times, stretch_times
from labinfer.cli.bench.latency import LatencyBenchmark
from labinfer.cli.bench.load import RequestTimes
from labinfer.cli.bench.options import GOALS, BenchOptions, LatencyOptions, LoadOptions, ServeOptions
from labinfer.cli.bench.requests import WARM_UP, RequestMaker
from labinfer.cli.bench.serve import MEASURES, ServeBenchmark, is_good
from labinfer.cli.bench.spread import spread, spread_keys, spread_table
from labinfer.cli.bench.throughput import ThroughputBenchmark


@pytest.fixture(scope="module")
def llm() -> LLM:
    with LLM("demo", max_model_len=128, num_kv_blocks=64, log_level="warning") as llm:
        yield llm


# When requests come.


def test_arrivals_are_a_poisson_process():
    times = arrival_times(20_001, rate=4.0, seed=1)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert times[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(1 / 4, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.03)  # of an exponential, the same as its mean
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), rel=0.1)


def test_arrivals_follow_the_seed():
    assert arrival_times(5, 1.0, 3) == arrival_times(5, 1.0, 3) != arrival_times(5, 1.0, 4)
    assert arrival_times(3, math.inf, 0) == [0.0, 0.0, 0.0]


def test_arrivals_may_come_in_bursts_or_evenly():
    def variation(burstiness: float) -> float:
        times = arrival_times(20_001, rate=4.0, seed=1, burstiness=burstiness)
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        assert statistics.fmean(gaps) == pytest.approx(1 / 4, rel=0.05)
        return statistics.stdev(gaps) / statistics.fmean(gaps)

    assert variation(0.25) == pytest.approx(2.0, rel=0.05)
    assert variation(4.0) == pytest.approx(0.5, rel=0.05)


def test_arrivals_are_stretched_to_a_rate():
    assert stretch_times([0.0, 1.0, 4.0], 0.25) == [0.0, 2.0, 8.0]
    assert stretch_times([0.0, 1.0, 4.0], math.inf) == [0.0, 1.0, 4.0]
    assert stretch_times([0.0, 0.0], 2.0) == [0.0, 0.0]


@dataclass
class FakeLLM:
    """What ``Arrivals`` sees of an LLM: the time, whether it has work, and how many are finished."""

    clock: FakeClock
    engine: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(has_work=False))
    report: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(num_finished=3))


def test_request_comes_when_it_is_due(clock):
    source = iter(Arrivals(FakeLLM(clock), ["a", "b"], [0.0, 1.0]))
    assert next(source) == "a"
    while (request := next(source)) is None:
        clock.now += 0.01  # as LLM.run sleeps
    assert request == "b" and clock.now == pytest.approx(1001.0)


def test_what_the_engine_takes_late_is_late(clock):
    llm = FakeLLM(clock)
    arrivals = Arrivals(llm, ["a", "b"], [0.0, 1.0])
    source = iter(arrivals)
    next(source)
    llm.engine.has_work = True
    clock.now += 0.5
    assert next(source) is None
    clock.now += 0.75  # a long step
    assert next(source) == "b"
    assert arrivals.late == pytest.approx([0.0, 0.25])
    assert arrivals.empty_time == 0.0


def test_time_without_work_is_counted(clock):
    arrivals = Arrivals(FakeLLM(clock), ["a", "b"], [0.0, 1.0])
    for _request in arrivals:
        clock.now += 0.01
    assert arrivals.empty_time == pytest.approx(0.99)


def test_request_beyond_the_limit_is_sent_when_others_are_done(clock):
    llm = FakeLLM(clock)
    arrivals = Arrivals(llm, ["a", "b", "c", "d"], [0.0] * 4, max_concurrency=2)
    source = iter(arrivals)
    assert [next(source), next(source), next(source)] == ["a", "b", None]
    clock.now += 5.0
    assert next(source) is None
    llm.report.num_finished += 2  # both in one step
    assert [next(source), next(source)] == ["c", "d"]
    assert arrivals.late == [0.0] * 4  # they were not sent before


# What is said of times.


def test_spread_of_known_values():
    assert spread([4.0, 1.0, 2.0, 3.0]) == {"mean": 2.5, "median": 2.5, "p90": 4.0, "p99": 4.0}
    assert spread([]) == {}
    assert spread_keys("ttft", [0.1, 0.3]) == {
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 200.0,
        "p90_ttft_ms": 300.0,
        "p99_ttft_ms": 300.0,
    }


def test_table_leaves_out_what_has_no_values():
    lines = spread_table({"TTFT": [0.5], "ITL": []}).splitlines()
    assert len(lines) == 3 and lines[2].split() == ["TTFT", *["500.0"] * 4]


def test_goals_have_measures():
    assert tuple(MEASURES) == GOALS


def test_goals_are_read_in_milliseconds():
    assert ServeOptions(goodput=("ttft:500", "e2el:2000")).goals == {"ttft": 0.5, "e2el": 2.0}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:fast", "itl:5", "ttft:0", "ttft:-1", "ttft:nan", ""])
def test_goals_that_make_no_sense_are_refused(text):
    with pytest.raises(UserError) as caught:
        ServeOptions(goodput=(text,))
    assert "--goodput" in str(caught.value) and "ttft" in str(caught.value)


def test_good_request_keeps_all_goals():
    times = RequestTimes(first_token=0.5, per_output_token=0.02, end=1.5, prompt_tokens=1, output_tokens=51)
    assert is_good(times, {"ttft": 0.5, "tpot": 0.02, "e2el": 1.5})
    assert not is_good(times, {"ttft": 0.5, "tpot": 0.019})
    assert not is_good(times, {"e2el": 1.4})


@pytest.mark.parametrize("name", ["request_rate", "burstiness"])
@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_rates_and_bursts_that_make_no_sense_are_refused(name, value):
    with pytest.raises(UserError, match="--" + name.replace("_", "-")):
        convert_section(ServeOptions, {name: value})


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (BenchOptions, "input_len"),
        (BenchOptions, "output_len"),
        (LatencyOptions, "batch_size"),
        (LoadOptions, "num_prompts"),
    ],
)
def test_counts_are_at_least_one(section, key):
    with pytest.raises(UserError, match="at least 1, not 0"):
        check_bounds(section(**{key: 0}))


# Whole benchmarks, on the demo model.

OPTIONS = BenchOptions(input_len=20, output_len=6)


def run(benchmark, llm):
    benchmark.prepare(llm)
    figures = benchmark.run(llm, lambda: None)
    return json.loads(json.dumps(figures.values, allow_nan=False)), figures.text


def spread_names(*names):
    return {f"{statistic}_{name}_ms" for name in names for statistic in ("mean", "median", "p90", "p99")}


def test_latency_has_a_time_for_every_batch_that_counts(llm):
    values, text = run(LatencyBenchmark(OPTIONS, LatencyOptions(batch_size=3, num_iters_warmup=1, num_iters=4)), llm)
    assert set(values) == {"avg_latency", "latencies", "percentiles"} | spread_names("ttft", "tpot")
    assert len(values["latencies"]) == 4
    assert values["avg_latency"] == pytest.approx(statistics.fmean(values["latencies"]))
    assert values["mean_ttft_ms"] + 5 * values["mean_tpot_ms"] <= 1000 * max(values["latencies"])
    assert "4 batches of 3 requests, 20 prompt and 6 output tokens each" in text
    assert llm.report.num_finished == 15  # those that do not count as well


def test_batches_run_one_after_another(llm):
    batches = LatencyBenchmark(OPTIONS, LatencyOptions(batch_size=2, num_iters_warmup=0, num_iters=2))
    batches.prepare(llm)
    order = [output.key for output in llm.run(batches._requests(llm))]
    assert order == [0, 0, 1, 1]


def test_throughput_counts_what_is_no_warm_up(llm):
    values, text = run(ThroughputBenchmark(OPTIONS, LoadOptions(num_prompts=5, num_warmups=2)), llm)
    assert set(values) == {
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
        "input_tokens_per_second",
        "output_tokens_per_second",
    }
    assert values["num_requests"] == 5 and values["total_num_tokens"] == 5 * 26
    assert values["requests_per_second"] == pytest.approx(5 / values["elapsed_time"])
    assert values["output_tokens_per_second"] == pytest.approx(30 / values["elapsed_time"])
    assert values["elapsed_time"] < llm.report.wall_time
    assert "output tokens" in text


def test_serving_has_every_latency(llm):
    serve = ServeOptions(request_rate=200.0, goodput=("e2el:60000",))
    values, text = run(ServeBenchmark(OPTIONS, LoadOptions(num_prompts=6), serve), llm)
    counts = {"duration", "completed", "total_input_tokens", "total_output_tokens", "request_rate", "max_concurrency"}
    rates = {"request_throughput", "output_throughput", "total_token_throughput", "request_goodput"}
    assert set(values) == counts | rates | spread_names("ttft", "tpot", "itl", "e2el")
    assert values["completed"] == 6 and values["total_output_tokens"] == 36
    assert values["request_goodput"] == pytest.approx(values["request_throughput"])
    # Five gaps in each answer of six tokens, between its first token and its end; each is handed on a moment after it came.
    assert 0 < values["mean_itl_ms"] <= values["mean_tpot_ms"] + 0.5
    assert values["mean_ttft_ms"] + 5 * values["mean_tpot_ms"] == pytest.approx(values["mean_e2el_ms"], abs=0.01)
    assert "goodput: 6 of 6 requests" in text and "E2EL" in text


def test_infinite_rate_is_still_json(llm):
    values, _ = run(ServeBenchmark(OPTIONS, LoadOptions(num_prompts=1, num_warmups=0), ServeOptions()), llm)
    assert values["request_rate"] == "inf"


def test_interrupted_benchmark_leaves_the_llm_usable(llm):
    benchmark = ThroughputBenchmark(OPTIONS, LoadOptions(num_prompts=5))
    benchmark.prepare(llm)

    def check() -> None:
        raise Interrupted(2)

    with pytest.raises(Interrupted):
        benchmark.run(llm, check)
    assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))) == 1


def test_random_prompts_follow_the_seed(llm):
    def prompt(seed: int) -> list[int]:
        return RequestMaker(llm, BenchOptions(input_len=30, output_len=2, seed=seed)).random(WARM_UP).prompt_token_ids

    assert prompt(0) == prompt(0) != prompt(1)
    assert len(prompt(0)) == 30


def test_request_that_cannot_run_is_refused_before_anything_runs(llm):
    with pytest.raises(UserError, match="make 256 tokens, more than the context length of 128"):
        LatencyBenchmark(BenchOptions(input_len=128), LatencyOptions()).prepare(llm)


def test_data_set_is_a_job_file(llm, tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6, 7], "max_tokens": 3}\n\n{"prompt": "17 + 25 = ?"}\n{"prompt": "x"}\n')
    requests = RequestMaker(llm, OPTIONS).dataset(str(path), 2)
    assert [request.key for request in requests] == [0, 1]
    assert [request.sampling.max_tokens for request in requests] == [3, OPTIONS.output_len]
    assert all(request.sampling.ignore_eos for request in requests)
    assert requests[0].prompt_token_ids == [5, 6, 7]


def test_workload_has_the_lengths_arrivals_and_shared_prefixes_of_its_file(llm, tmp_path):
    path = tmp_path / "mooncake.jsonl"
    lines = [(1000, 40, 3, [7]), (1500, 50, 2, [7]), (2500, 30, 4, [9])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(keys, line, strict=True))) for line in lines), encoding="utf-8")
    load = LoadOptions(num_prompts=2, workload=str(path))
    requests, arrivals = RequestMaker(llm, OPTIONS).workload(str(path), 2)
    assert [len(request.prompt_token_ids) for request in requests] == [40, 50]
    assert [request.sampling.max_tokens for request in requests] == [3, 2]
    assert requests[0].prompt_token_ids == requests[1].prompt_token_ids[:40]
    assert arrivals == [0.0, 0.5]
    everything, _ = RequestMaker(llm, OPTIONS).workload(str(path), 10)
    assert everything[2].prompt_token_ids[:8] != everything[0].prompt_token_ids[:8]
    values, _ = run(ServeBenchmark(OPTIONS, load, ServeOptions(request_rate=20.0)), llm)
    assert (values["total_input_tokens"], values["total_output_tokens"]) == (90, 5)
    assert values["request_rate"] == 20.0 and values["duration"] < 0.5


def test_prompts_of_a_server_s_workload_share_what_was_found_in_its_cache(llm, tmp_path):
    path = tmp_path / "day.jsonl"
    lines = [(1000, 40, 0, 3), (1500, 50, 32, 2), (2500, 30, 16, 4)]
    keys = ("timestamp", "prompt_tokens", "cached_tokens", "output_tokens")
    path.write_text("\n".join(json.dumps(dict(zip(keys, line, strict=True))) for line in lines), encoding="utf-8")
    first, second, third = (
        request.prompt_token_ids for request in RequestMaker(llm, OPTIONS).workload(str(path), 3)[0]
    )
    assert [len(prompt) for prompt in (first, second, third)] == [40, 50, 30]
    assert second[:16] == third[:16] and second[16:24] != third[16:24] and first[:8] != second[:8]


def test_workload_that_does_not_fit_the_context_is_refused(llm, tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_tokens": 120, "output_tokens": 9}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"120 \+ 9 tokens, more than the context length of 128"):
        RequestMaker(llm, OPTIONS).workload(str(path), 1)


def test_requests_come_from_one_file():
    with pytest.raises(UserError, match="--dataset a.jsonl and --workload b.csv"):
        LoadOptions(dataset="a.jsonl", workload="b.csv")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{no json", "line 1"), (b'\n{"prompt": ""}', "line 2"), (b"\n", "is empty"), (None, "cannot read")],
)
def test_data_set_that_is_none_is_refused(llm, tmp_path, content, words):
    path = tmp_path / "requests.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        RequestMaker(llm, OPTIONS).dataset(str(path), 5)
    assert words in str(caught.value) and "--dataset" in str(caught.value)
