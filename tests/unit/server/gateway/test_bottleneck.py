"""Bottleneck reports: what bounds a model by what its ranks measured, and nothing said of what they did not."""

from __future__ import annotations

import pytest

from labinfer.server.gateway.bottleneck import diagnose
from labinfer.server.link.frames import ModelInfo, RankShardInfo
from labinfer.server.link.stats import EngineStats, RankStats


def info(stages: tuple[int, ...] = (0, 1), num_layers: int = 4, hop: float = 0.0) -> ModelInfo:
    """A model with a rank on each of these stages."""
    ranks = [
        RankShardInfo(
            rank=number,
            stage=stage,
            tp_rank=0,
            host="here",
            device="cpu",
            first_layer=stage * num_layers,
            num_layers=num_layers,
            dtype="float32",
            kv_dtype="float32",
            quantization="none",
            weight_bytes=1,
            kv_bytes=1,
        )
        for number, stage in enumerate(stages)
    ]
    return ModelInfo(
        name="m",
        tokenizer="",
        needs_tokenizer=False,
        response_template="",
        chat_template="",
        recommended={},
        vocab_size=8,
        hidden_size=8,
        max_model_len=64,
        context_shift=False,
        num_layers=8,
        num_parameters=1000,
        block_size=4,
        num_blocks=16,
        max_num_seqs=8,
        pipeline_schedule="1f1b",
        stage_latency_seconds=hop,
        ranks=ranks,
    )


def window(*busy: float, stages: tuple[int, ...] = (0, 1), seconds: float = 10.0, steps: int = 100, **fields):
    """Stats at the begin and the end of so many seconds with work, in which each rank computed such a part."""
    fields = {"running": 4, "waiting": 0, "kv_usage": 0.1, "num_preemptions": 0} | fields

    def stats(share: float) -> EngineStats:
        ranks = [
            RankStats(
                rank=number,
                stage=stages[number],
                tp_rank=0,
                num_threads=1,
                cpus="0",
                num_steps=7 + round(steps * share),
                busy_seconds=3 + part * seconds * share,
                bubble_seconds=5 + (1 - part) * seconds * share,
            )
            for number, part in enumerate(busy)
        ]
        return EngineStats(model="m", ranks=ranks, **fields | {"num_preemptions": fields["num_preemptions"] * share})

    return [stats(0.0), stats(1.0)]


@pytest.mark.parametrize(
    "busy, fields, hop, others_ran, bound",
    [
        ((0.5, 0.95), {}, 0, False, "stage"),
        ((0.3, 0.7), {}, 0, False, "outside"),  # it waits longer than it is ahead of the mean
        ((0.2, 0.7), {}, 0, False, "outside"),
        ((0.1, 0.75), {}, 0, False, "stage"),
        ((0.93, 0.95), {}, 0, False, "stages"),
        ((0.5, 0.45), {"running": 1}, 0, False, "requests"),
        ((0.95, 0.95), {"running": 1}, 0, False, "stages"),  # the chunks of one long prompt
        ((0.5, 0.45), {}, 0, False, "outside"),
        ((0.5, 0.45), {}, 0, True, "models"),
        ((0.5, 0.45), {}, 0.03, False, "communication"),  # of 50 ms a step
        ((0.5, 0.45), {}, 0.02, False, "outside"),
        ((0.5, 0.45), {"running": 0}, 0, False, "outside"),  # nobody saw any that ran: too few cannot be said
    ],
)
def test_bound_follows_from_what_was_measured(busy, fields, hop, others_ran, bound):
    report = diagnose(window(*busy, **fields), info(hop=hop), 1, others_ran)
    assert report.bound == bound
    assert [stage.busy for stage in report.stages] == pytest.approx(busy)
    assert report.seconds == pytest.approx(10) and report.time_us == 1


def test_one_stage_is_said_by_how_much_it_is_ahead():
    report = diagnose(window(0.4, 0.96, 0.56, stages=(0, 1, 2)), info((0, 1, 2)), 1, False)
    assert (report.bound, report.busiest, report.move_to) == ("stage", 1, 0)
    assert report.lead == pytest.approx(2.0)
    assert report.stages[1].step_seconds == pytest.approx(0.096)


def test_layer_is_not_to_be_moved_from_a_stage_that_has_one():
    report = diagnose(window(0.4, 0.96), info(num_layers=1), 1, False)
    assert (report.bound, report.move_to) == ("stage", None)


def test_stage_is_as_busy_as_its_busiest_rank():
    stages = (0, 0, 1)
    report = diagnose(window(0.2, 0.9, 0.5, stages=stages), info(stages), 1, False)
    assert [stage.busy for stage in report.stages] == pytest.approx([0.9, 0.5])


@pytest.mark.parametrize("busy, bound", [(0.97, "stages"), (0.6, "outside")])
def test_single_stage_has_nobody_to_be_compared_with(busy, bound):
    report = diagnose(window(busy, stages=(0,), running=1), info((0,)), 1, False)
    assert (report.bound, report.lead, report.move_to) == (bound, 1.0, None)


@pytest.mark.parametrize(
    "fields, full",
    [
        ({"waiting": 3, "kv_usage": 0.97}, "kv_cache"),
        ({"waiting": 3, "num_preemptions": 2}, "kv_cache"),
        ({"waiting": 3, "running": 8}, "max_num_seqs"),
        ({"waiting": 3}, None),
        ({"waiting": 0, "kv_usage": 0.97, "running": 8}, None),
    ],
)
def test_sequences_wait_for_what_is_full(fields, full):
    assert diagnose(window(0.9, 0.9, **fields), info(), 1, False).full == full


@pytest.mark.parametrize(
    "stats",
    [
        [],
        window(0.9, 0.9)[:1],
        window(0.9, 0.9, seconds=1.9),
        window(0.9, 0.9, steps=4),
        window(0.9, stages=(0,)),  # of the other rank nothing has come
        [EngineStats(model="m"), window(0.9, 0.9)[1]],
    ],
    ids=["nothing", "one moment", "short", "few steps", "one rank", "ranks that have just told"],
)
def test_report_needs_work_of_every_rank(stats):
    assert diagnose(stats, info(), 1, False) is None


def test_report_begins_when_all_ranks_have_told():
    stats = [EngineStats(model="m", running=1), *window(0.9, 0.9)]
    assert diagnose(stats, info(), 1, False) == diagnose(stats[1:], info(), 1, False)
