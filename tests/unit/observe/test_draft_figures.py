"""DraftFigures: what a run, /metrics and the usage of an answer tell of drafted tokens."""

from __future__ import annotations

from collections import Counter

from msgspec import UNSET
from prometheus_client import CollectorRegistry, generate_latest

from labinfer.observe.draft_figures import DraftFigures
from labinfer.observe.report import RunReport
from labinfer.requests.openai.api_object import count_usage
from labinfer.server.gateway.engine_metrics import EngineMetrics
from labinfer.server.link.stats import EngineStats

COUNTS = Counter(
    {
        "drafts": 10,
        "drafted": 25,
        "accepted": 12,
        "drafted_0": 10,
        "drafted_1": 10,
        "drafted_2": 5,
        "accepted_0": 8,
        "accepted_1": 4,
        "draft_seconds": 0.02,
        "saved_seconds": 1.5,
    }
)


def test_figures_are_those_of_the_counts():
    figures = DraftFigures.read(COUNTS)
    assert figures.acceptance() == [0.8, 0.4, 0.0] and figures.tokens_per_step == 2.2
    assert figures.as_dict() == {
        "drafts": 10,
        "continued": 0,
        "drafted": 25,
        "accepted": 12,
        "acceptance_by_place": [0.8, 0.4, 0.0],
        "tokens_per_step": 2.2,
        "draft_s": 0.02,
        "saved_s": 1.5,
        "failures": 0,
    }


def test_report_has_a_line_where_tokens_were_drafted():
    report = RunReport(counts=COUNTS)
    (line,) = [line for line in report.format().splitlines() if line.startswith("drafted tokens")]
    assert "12 of 25 accepted (48.0 %; by draft position 80 40 0 %), 2.20 tokens per step" in line
    assert "about 1.5" in line and "saved" in line
    assert report.as_dict()["speculation"]["accepted"] == 12
    plain = RunReport()
    assert "drafted" not in plain.format() and plain.as_dict()["speculation"] is None


def test_report_tells_of_drafts_behind_others():
    report = RunReport(counts=COUNTS | Counter(continued=4))
    assert "1.80 tokens per step" in report.format() and "4 of 10 drafts continued an unverified one" in report.format()
    assert "continued" not in RunReport(counts=COUNTS).format()


def test_report_says_that_a_drafter_failed():
    assert "no tokens were drafted; the drafter failed" in RunReport(counts=Counter(drafter_failures=1)).format()


def test_metrics_have_the_names_of_vllm():
    metrics, registry = EngineMetrics(["demo"]), CollectorRegistry()
    registry.register(metrics)
    metrics.update(
        EngineStats(model="demo", num_drafts=10, drafted_tokens=25, accepted_by_place=[8, 4], draft_seconds=0.5)
    )
    text = generate_latest(registry).decode()
    for line in (
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="demo"} 10.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="demo"} 25.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="demo"} 12.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="1"} 4.0',
        'labinfer:draft_seconds_total{engine="0",model_name="demo"} 0.5',
    ):
        assert line in text


def test_usage_tells_of_drafted_tokens_where_there_were_any():
    details = count_usage(5, 9, 0, drafted=7, accepted=4).completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 3)
    assert details.reasoning_tokens is UNSET
    assert count_usage(5, 9, 0).completion_tokens_details is UNSET
    assert count_usage(5, 9, 0, 2).completion_tokens_details.accepted_prediction_tokens is UNSET
