"""Costs of steps, against sums made by hand."""

from __future__ import annotations

import msgspec
import pytest

from labinfer.base.errors import UserError
from labinfer.base.plan import BatchEntry, BatchPlan
from labinfer.planner.costs import DraftBytes, HostCosts, LayerCosts, Points
from labinfer.planner.merge_costs import merge_ranks
from labinfer.planner.objective import RESERVE, EngineLimits, cache_room
from labinfer.planner.overheads import Overheads
from labinfer.planner.step_shape import StepShape, tokens_seen

LAYER = LayerCosts(
    linear=Points([1, 8, 9, 64], [1e-3, 1e-3, 2e-3, 4e-3]),
    small=Points([1], [1e-5]),
    decode=(1e-4, 1e-5, 1e-7),
    chunk=(2e-4, 1e-6, 1e-9),
)
HOST = HostCosts(
    name="node",
    model="m",
    dtype="bfloat16",
    memory=1 << 30,
    layers=["moe", "dense", "dense"],
    layer_kinds={"dense": LAYER, "moe": msgspec.structs.replace(LAYER, linear=Points([1], [7e-3]))},
    layer_bytes={"dense": 100, "moe": 300},
    kv_bytes={"dense": 4, "moe": 4},
    hidden_bytes=1792,
    embedding_bytes=50,
    head_bytes=60,
    head=Points([1, 64], [1e-3, 5e-3]),
    embed=Points([1], [3e-5]),
    fixed=5e-4,
)


def test_points_are_joined_by_lines_and_the_last_slope_goes_on():
    points = Points([1, 8, 9, 16], [1.0, 1.0, 2.0, 9.0])
    assert [points.at(size) for size in (0.5, 1, 4, 8, 9, 12.5, 16, 18)] == [1, 1, 1, 1, 2, 5.5, 9, 11]


def test_points_that_fall_at_their_end_are_not_followed_below():
    assert Points([1, 2], [2.0, 1.0]).at(100) == 1.0


def test_points_with_a_single_size_are_the_same_everywhere_and_no_points_cost_nothing():
    assert Points([4], [2.0]).at(1) == Points([4], [2.0]).at(100) == 2.0
    assert Points([], []).at(3) == 0.0


def test_shape_of_a_plan_has_its_decodes_chunks_and_samples():
    def entry(num_tokens, position, num_samples, is_decode):
        return BatchEntry(
            seq_id=0, num_tokens=num_tokens, begin=position, position=position, first_block=0, new_blocks=[],
            num_samples=num_samples, is_decode=is_decode,
        )  # fmt: skip

    entries = [entry(1, 99, 1, True), entry(1, 9, 1, True), entry(3, 20, 3, True), entry(64, 128, 0, False)]
    plan = BatchPlan(step_id=0, starts=[], finished=[], moves=[], entries=entries)
    shape = StepShape.from_plan(plan)
    assert shape == StepShape(2, 110, ((3, 20), (64, 128)), 5)
    assert shape.rows == plan.num_tokens == 69


def test_step_is_the_sum_of_its_parts():
    shape = StepShape(8, 800, ((56, 100),), 9)
    small_and_attention = 1e-5 + (1e-4 + 8e-5 + 800e-7) + (2e-4 + 56e-6 + 1e-9 * 56 * 128)
    dense, moe = 4e-3 + small_and_attention, 7e-3 + small_and_attention
    assert HOST.step_seconds(shape, {"dense": 2}, is_first=False, is_last=False) == pytest.approx(5e-4 + 2 * dense)
    both = HOST.step_seconds(shape, HOST.count_layers(0, 3), is_first=True, is_last=True)
    assert both == pytest.approx(5e-4 + 2 * dense + moe + 3e-5 + 1e-3 + 8 / 63 * 4e-3)


def test_step_without_samples_has_no_head():
    shape = StepShape(chunks=((64, 0),))
    parts = [HOST.step_seconds(shape, {"dense": 1}, is_first=False, is_last=last) for last in (False, True)]
    assert parts[0] == parts[1]


def test_last_layer_leaves_out_rows_that_are_not_sampled():
    host = msgspec.structs.replace(HOST, skipped=Points([0, 63], [0.0, 1e-3]))
    shape = StepShape(8, 800, ((56, 100),), 9)
    for is_last in (False, True):
        whole, less = (each.step_seconds(shape, {"dense": 2}, is_first=False, is_last=is_last) for each in (HOST, host))
        assert whole - less == pytest.approx(is_last * (55 / 63 * 1e-3 + 1e-9 * 56 * 100), abs=1e-9)
    decodes = StepShape(8, 800, (), 8)
    whole, less = (each.step_seconds(decodes, {"dense": 2}, is_first=False, is_last=True) for each in (HOST, host))
    assert whole == less


def test_tokens_see_no_more_than_their_window():
    layer = msgspec.structs.replace(LAYER, window=50)
    shape = StepShape(2, 110, ((3, 20), (56, 100)), 2)
    seen = 1e-7 * 10 + 1e-9 * 56 * (128 - 50)
    assert LAYER.seconds(shape) - layer.seconds(shape) == pytest.approx(seen, rel=1e-6)
    exact = sum(min(30 + number, 50) for number in range(1, 41))
    assert tokens_seen(40, 30, 50) == pytest.approx(exact, rel=0.01)
    assert tokens_seen(40, 30) == 40 * (30 + 20)


def test_sums_of_tensor_parallel_ranks_are_two_a_layer_by_their_bytes():
    host = msgspec.structs.replace(HOST, tp_size=2, all_reduce=Points([0, 1792], [0.0, 1e-3]))
    shape = StepShape(2, 20, (), 2)
    assert host.layer_seconds("dense", shape) == pytest.approx(HOST.layer_seconds("dense", shape) + 2 * 2e-3)


def test_draft_model_is_held_on_the_first_stage_and_an_mtp_layer_on_the_last():
    costs = msgspec.structs.replace(HOST, drafting=DraftBytes(first=1000, first_kv=5, last=7000, last_kv=6))
    limits, kv_bytes = EngineLimits(max_model_len=1024, block_size=16), {}
    added = {
        (True, False): 1000,
        (False, True): 7000 + 50,
        (True, True): 8000,
        (False, False): 0,
    }  # 50 for the embedding
    for ends, expected in added.items():
        kwargs = dict(zip(("is_first", "is_last"), ends, strict=True))
        before, after = (each.weight_bytes({"dense": 2}, **kwargs) for each in (HOST, costs))
        assert after - before == expected
        rooms = [cache_room(each, {"dense": 2}, limits, **kwargs) for each in (HOST, costs)]
        kv_bytes[ends] = (rooms[1].block_bytes - rooms[0].block_bytes) / 16
        assert rooms[0].num_bytes - rooms[1].num_bytes == pytest.approx(expected * (1 - RESERVE), abs=1)
    assert list(kv_bytes.values()) == [5, 6, 11, 0]
    states = msgspec.structs.replace(costs, drafting=DraftBytes(first=1000, first_state=3))
    for is_first, expected in ((True, 2 * limits.max_num_seqs * 3), (False, 0)):
        kwargs = {"is_first": is_first, "is_last": not is_first}
        rooms = [cache_room(each, {"dense": 2}, limits, **kwargs) for each in (HOST, states)]
        assert rooms[0].num_bytes - rooms[1].num_bytes == pytest.approx(
            (expected + 1000 * is_first) * (1 - RESERVE), abs=1
        )
    tied = msgspec.structs.replace(costs, shared_bytes=50)
    assert tied.weight_bytes({"dense": 2}, is_first=False, is_last=True) == 200 + 60 + 7000
    assert merge_ranks([HOST, costs]).drafting == costs.drafting


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"drafting": DraftBytes(last=-1)}, "last of the drafting in the costs of node has -1"),
        ({"fixed": -1.0}, "fixed in the costs of node has -1"),
        ({"memory": -1}, "memory in the costs of node has -1"),
        ({"fixed": float("nan")}, "has nan"),
        ({"layers": []}, "list no layers"),
        ({"layers": ["dense", "other"]}, "have no layer_kinds for layers of kind 'other'"),
        ({"kv_bytes": {"dense": 1}}, "have no kv_bytes for layers of kind 'moe'"),
        ({"head": Points([1, 1], [1.0, 1.0])}, "do not ascend"),
        ({"head": Points([1, 2], [1.0])}, "2 sizes but 1 times"),
        ({"tp_size": 0}, "tp_size"),
        ({"head": Points([], [])}, "head in the costs of node has no points"),
        ({"embed": Points([], [])}, "embed in the costs of node has no points"),
        ({"overheads": Overheads(lead=-1.0)}, "lead of the overheads in the costs of node has -1"),
    ],
)
def test_costs_that_cannot_be_are_refused_in_one_line(changes, text):
    with pytest.raises(UserError, match=text) as error:
        msgspec.structs.replace(HOST, **changes).check()
    assert "\n" not in str(error.value)


def test_layer_without_products_is_refused():
    kinds = {"dense": LAYER, "moe": msgspec.structs.replace(LAYER, linear=Points([], []))}
    with pytest.raises(UserError, match="linear of layers of kind 'moe'"):
        msgspec.structs.replace(HOST, layer_kinds=kinds).check()


def test_costs_come_back_from_json():
    assert msgspec.json.decode(msgspec.json.encode(HOST), type=HostCosts) == HOST
