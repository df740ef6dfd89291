"""Costs of a host are found again where they are known, name every kind of layers, and agree with the layout in bytes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint

from labinfer import LLM
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.group.rank_group import RankGroup, join_group
from labinfer.comm.spmd.environment import detect
from labinfer.launch.layout.layout import Layout, make_layout
from labinfer.launch.measure import probe
from labinfer.launch.measure.cost_file import read_costs, write_costs
from labinfer.launch.measure.layer_fit import fit_layer
from labinfer.launch.measure.probe import probe_cluster, sum_over_ranks
from labinfer.launch.measure.probe_layout import all_degrees, kind_name, layer_places, measured_bytes, split_machines
from labinfer.launch.providers import describe_device
from labinfer.models.config import ModelConfig
from labinfer.models.registry import load_config
from labinfer.planner.cluster import Cluster, MachinePairLink, NetworkLink
from labinfer.planner.costs import DraftBytes, HostCosts, LayerCosts, Points
from labinfer.planner.step_shape import StepShape
from labinfer.weights.loader import weight_bytes
from labinfer.worker.step_graphs import CAPTURED_BYTES


class Probed(NamedTuple):
    """A small model, its cluster of one machine at two probes, what the second one did, that machine's layout, and its group."""

    directory: Path
    cluster: Cluster
    again: Cluster
    texts: list[str]
    config: ModelConfig
    layout: Layout
    group: RankGroup


@pytest.fixture(scope="module", params=["qwen2-tied", "qwen3.5-moe", "gemma4-layer-inputs"])
def probed(request, tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("probe") / "model", request.param)
    options = EngineOptions.from_flat({"model": str(directory), "autotune": False})
    group = join_group(detect(), options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "cache_folder", lambda: directory)
        patch.setattr("labinfer.launch.measure.layer_profiler.BATCH_SECONDS", 0.001)
        patch.setattr(probe, "MAX_MEASUREMENTS", 20)  # as batches are so short
        cluster = probe_cluster(group, options)
        texts: list[str] = []
        drafting = EngineOptions.from_flat(
            {"model": str(directory), "autotune": False, "speculative_config": {"model": str(directory)}}
        )
        again = probe_cluster(group, drafting, texts.append, for_plan=True)
    config = load_config(directory)
    return Probed(directory, cluster, again, texts, config, make_layout(options, config, group.everyone), group)


def test_costs_are_measured_once(probed):
    assert probed.again.machines[0].costs[0].layer_kinds == probed.cluster.machines[0].costs[0].layer_kinds
    assert "loading some layers" not in probed.texts


def test_machine_has_the_block_size_of_its_devices(probed):
    assert [machine.block_size for machine in probed.cluster.machines] == [describe_device("cpu").block_size]


def test_costs_are_measured_anew_where_that_is_asked_for(probed, monkeypatch):
    monkeypatch.setattr(probe, "cache_folder", lambda: probed.directory)
    monkeypatch.setattr("labinfer.launch.measure.layer_profiler.BATCH_SECONDS", 0.001)
    monkeypatch.setattr(probe, "MAX_MEASUREMENTS", 20)
    links = []
    monkeypatch.setattr(probe, "measure_links", lambda *given: links.append(given) or {})
    for autotune, is_anew in (("on", True), ("on", False), ("again", True)):
        told: list[str] = []
        links.clear()
        options = EngineOptions.from_flat({"model": str(probed.directory), "autotune": autotune})
        probe_cluster(probed.group, options, told.append, for_plan=True)
        assert (any(text.startswith("loading some layers") for text in told), bool(links)) == (is_anew, is_anew), (
            autotune
        )


def test_communicators_of_a_probe_end_with_it(probed):
    assert probed.group.made == []


def test_what_was_measured_is_read_again(tmp_path):
    path, links = tmp_path / "links.json", [MachinePairLink(a="a", b="b", link=NetworkLink(1.0, 2.0))]
    write_costs(path, links)
    assert read_costs(path, list[MachinePairLink]) == links
    assert read_costs(path, HostCosts) is None
    write_costs(None, links)
    assert read_costs(None, HostCosts) is read_costs(tmp_path / "absent.json", HostCosts) is None


BROKEN = {
    "zeros": lambda seconds: [0.0] * len(seconds),
    "a zero at the end": lambda seconds: [*seconds[:-1], 0.0],
    "a fall": lambda seconds: [*seconds[:-1], max(seconds) / 1000],
    "a negative number": lambda seconds: [-1e-3, *seconds[1:]],
    "no number": lambda seconds: [math.nan, *seconds[1:]],
    "an endless number": lambda seconds: [math.inf, *seconds[1:]],
}


@pytest.mark.parametrize("broken", BROKEN)
def test_costs_that_cannot_be_are_not_read(probed, tmp_path, caplog, broken):
    """Sealed or not: a version that kept them may have sealed them. NaN and infinity are null in JSON."""
    costs, path = probed.cluster.machines[0].costs[0], tmp_path / "host.json"
    good = {kind: with_seconds(each, [1e-3] * len(each.linear.sizes)) for kind, each in costs.layer_kinds.items()}
    flat = Points([1.0, 8.0], [1e-3, 1e-3])
    costs = msgspec.structs.replace(costs, layer_kinds=good, head=flat, embed=flat)
    write_costs(path, costs)
    assert read_costs(path, HostCosts, HostCosts.check_measured) == costs and not caplog.records
    kind = costs.layers[-1]
    bad = with_seconds(good[kind], BROKEN[broken](good[kind].linear.seconds))
    write_costs(path, msgspec.structs.replace(costs, layer_kinds=good | {kind: bad}))
    assert read_costs(path, HostCosts, HostCosts.check_measured) is None
    assert f"{path} is ignored (" in caplog.text
    path.write_bytes(msgspec.json.encode(costs))  # edited by hand
    assert read_costs(path, HostCosts, HostCosts.check_measured) is None and "it has no digest" in caplog.text


def with_seconds(costs: LayerCosts, seconds: list[float]) -> LayerCosts:
    return msgspec.structs.replace(costs, linear=Points(costs.linear.sizes, seconds))


@pytest.mark.parametrize("probed", ["qwen2-tied"], indirect=True)
@pytest.mark.parametrize(("num_impossible", "is_kept"), [(1, True), (2, False)])
def test_impossible_costs_are_measured_again_and_never_kept(
    probed, tmp_path, monkeypatch, caplog, num_impossible, is_kept
):
    measured, measure = [], probe.measure_costs

    def measure_badly(*arguments) -> HostCosts:
        costs = measure(*arguments)
        flat = Points([1.0, 8.0], [1e-3, 0.0 if len(measured) < num_impossible else 2e-3])
        kinds = {kind: msgspec.structs.replace(each, linear=flat) for kind, each in costs.layer_kinds.items()}
        measured.append(costs)
        return msgspec.structs.replace(
            costs, layer_kinds=kinds, head=Points([1.0], [1e-3]), embed=Points([1.0], [1e-3])
        )

    monkeypatch.setattr(probe, "measure_costs", measure_badly)
    monkeypatch.setattr(probe, "MAX_MEASUREMENTS", 2)
    monkeypatch.setattr(probe, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr("labinfer.launch.measure.layer_profiler.BATCH_SECONDS", 0.001)
    probe_cluster(probed.group, EngineOptions.from_flat({"model": str(probed.directory), "autotune": False}))
    assert len(measured) == min(num_impossible + 1, probe.MAX_MEASUREMENTS)
    assert bool(list(tmp_path.glob("host-*.json"))) == is_kept
    assert ("the next start measures again" in caplog.text) != is_kept


@pytest.mark.parametrize("link", [NetworkLink(-1.0, 1e9), NetworkLink(0.0, 0.0), NetworkLink(1e-3, -1.0)])
def test_links_that_cannot_be_are_not_read(tmp_path, link):
    path = tmp_path / "links.json"
    write_costs(path, [MachinePairLink(a="a", b="b", link=link)])
    assert read_costs(path, list[MachinePairLink], probe._check_links) is None


def test_costs_can_be_read_from_the_file_that_is_saved(probed, tmp_path):
    cluster = probed.cluster
    (tmp_path / "a.json").write_bytes(msgspec.json.encode(cluster))
    read = Cluster.read([str(tmp_path / "a.json")])
    assert read == cluster and len(read.machines) == 1 and read.links == []
    costs = read.machines[0].costs[0]
    assert costs.measured and costs.memory > 0 and costs.fixed > 0 and costs.hardware
    assert 0 < costs.overheads.broadcast < 0.1 and 0 < costs.overheads.decode < 0.1
    shape = StepShape(chunks=((128, 0),), num_samples=1)  # a layer of two decodes may take less than noise does
    for kind in set(costs.layers):
        assert 0 < costs.layer_seconds(kind, shape) < costs.step_seconds(shape, {kind: 2}, is_first=True, is_last=False)
    last = costs.layers[-1]  # whose layer saves what is skipped
    assert costs.layer_seconds(last, shape) < costs.step_seconds(shape, {last: 2}, is_first=True, is_last=True)


def test_bytes_are_those_of_the_loaded_model(probed):
    config, layout = probed.config, probed.layout
    costs, meta = probed.cluster.machines[0].costs[0], layout.meta(layout.topology.place(0))
    assert len(costs.layers) == config.num_layers and set(costs.layers) == set(costs.layer_kinds)
    with LLM(str(probed.directory), autotune=False, num_kv_blocks=16) as llm:
        loaded = weight_bytes(llm._parts.worker.runner.model)
    layers, norm = costs.count_layers(0, config.num_layers), config.hidden_size * 4
    assert costs.weight_bytes(layers, is_first=True, is_last=True) == pytest.approx(loaded, abs=norm)
    assert (costs.shared_bytes > 0) == config.tied_embeddings
    assert sum(costs.kv_bytes[kind] for kind in costs.layers) == meta.bytes_per_token
    assert sum(costs.state_bytes[kind] for kind in costs.layers) == meta.bytes_per_sequence
    assert costs.hidden_bytes == config.hidden_size * layout.dtypes[0].itemsize


def test_bytes_of_a_draft_model_and_of_an_mtp_layer_are_told(probed):
    (without,), (own,) = (cluster.machines[0].costs for cluster in (probed.cluster, probed.again))
    meta = probed.layout.meta(probed.layout.topology.place(0))
    assert without.drafting == DraftBytes()
    assert own.drafting == DraftBytes(
        first=meta.weight_bytes + CAPTURED_BYTES, first_kv=meta.bytes_per_token, first_state=meta.bytes_per_sequence
    )
    config = load_config(probed.directory, with_mtp=True)
    if config.mtp is None:
        return
    options = EngineOptions.from_flat({"model": str(probed.directory), "pipeline_parallel_size": 2})
    everyone = [msgspec.structs.replace(probed.group.everyone[0], rank=rank) for rank in range(2)]
    layouts = [make_layout(options, each, everyone) for each in (probed.config, config)]
    plain, last = (layout.meta(layout.topology.place(1)) for layout in layouts)
    drafting = probe._draft_bytes(probed.group, options, probed.layout, config.mtp)
    before, after = (
        costs.weight_bytes({}, is_first=False, is_last=True)
        for costs in (without, msgspec.structs.replace(without, drafting=drafting))
    )
    assert after - before == last.weight_bytes - plain.weight_bytes > 0
    assert drafting.last_kv == last.mtp_bytes_per_token > 0


def test_last_layer_is_measured_with_the_rows_that_are_sampled(probed):
    costs = probed.cluster.machines[0].costs[0]
    assert costs.skipped.sizes[:1] == ([0] if probed.layout.max_model_len >= 128 else [])


def test_each_kind_of_layers_is_measured_in_its_first_layers(probed):
    first = probed.config.layers[0]
    alike = dataclasses.replace(first, mlp=dataclasses.replace(first.mlp))
    other = dataclasses.replace(first, mlp=probed.config.layers[-1].mixer)
    kind, other_kind = kind_name(first), kind_name(other)
    sizes = {kind: -(-measured_bytes() // 3), other_kind: measured_bytes() * 9}
    assert layer_places([first, alike, other] * 5, sizes) == {kind: [0, 1, 3], other_kind: [2, 5]}
    assert layer_places([first, other], sizes) == {kind: [0], other_kind: [1]}


def test_fit_gives_back_the_costs_that_steps_were_made_of():
    line = LayerCosts(
        linear=Points([1, 1000], [1e-3, 1.1]), small=Points([], []), decode=(0, 0, 3e-8), chunk=(0, 0, 2e-9)
    )
    fitted = fit_layer(line.seconds, most_decodes=64, length=3840)
    shapes = [
        StepShape(num_decodes=1, decode_context=3000),
        StepShape(num_decodes=40, decode_context=40 * 700),
        StepShape(chunks=((512, 0),)),
        StepShape(chunks=((200, 1000),)),
        StepShape(num_decodes=30, decode_context=30 * 99, chunks=((300, 300),)),
    ]
    for shape in shapes:
        assert fitted.seconds(shape) == pytest.approx(line.seconds(shape), rel=1e-6)
    few = fit_layer(line.seconds, most_decodes=2, length=40)
    assert few.linear.sizes == [1, 2] and few.decode[2] == few.chunk[2] == 0


def test_fit_of_a_layer_with_a_window_gives_back_its_costs():
    line = LayerCosts(
        linear=Points([1, 1000], [1e-3, 1.1]), small=Points([], []), decode=(0, 0, 3e-8), chunk=(0, 0, 2e-9), window=512
    )
    fitted = fit_layer(line.seconds, most_decodes=64, length=3840, window=512)
    shapes = [
        StepShape(num_decodes=1, decode_context=3000),
        StepShape(num_decodes=40, decode_context=40 * 300),
        StepShape(chunks=((200, 1000),)),
        StepShape(chunks=((512, 100),)),
    ]
    for shape in shapes:
        assert fitted.seconds(shape) == pytest.approx(line.seconds(shape), rel=1e-6)
    assert fit_layer(line.seconds, most_decodes=64, length=3840, window=16).decode[2] == 0


def test_noise_gives_no_negative_costs():
    fitted = fit_layer(lambda shape: 1e-3 / (1 + shape.decode_context + shape.rows), most_decodes=64, length=4096)
    assert fitted.decode[2] == fitted.chunk[2] == 0
    assert all(seconds >= 0 and math.isfinite(seconds) for seconds in fitted.linear.seconds)


def test_attention_that_costs_less_where_few_tokens_are_seen_leaves_time_to_the_rest_of_a_layer():
    """As in a model that a processor's cache holds: 0.1 µs a token beyond 100 of them, which would be all of 64 rows' time."""

    def seconds(shape: StepShape) -> float:
        seen = shape.seen_by_decodes(0) + sum(tokens * (before + tokens / 2) for tokens, before in shape.chunks)
        return 1e-5 + 1e-7 * shape.rows + 1e-7 * max(0.0, seen - 100 * shape.rows)

    fitted = fit_layer(seconds, most_decodes=64, length=4096)
    fitted.linear.check_possible("linear")
    assert all(time > 0 for time in fitted.linear.seconds) and fitted.decode[2] > 0
    few = StepShape(64, 64 * 64)
    assert fitted.seconds(few) == pytest.approx(seconds(few))


def test_ranks_of_a_node_are_split_into_stages():
    machines = [f"node-{rank // 4}" for rank in range(8)]
    options = EngineOptions.from_flat({"tensor_parallel_size": (2,)})
    assert split_machines(machines, options) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_all_degrees_are_measured_that_a_node_and_the_model_allow():
    def check(degree: int) -> None:
        if degree > 4:
            raise UserError("there are 4 heads")

    config = SimpleNamespace(layers=[SimpleNamespace(mixer=SimpleNamespace(check=check))])
    assert all_degrees("abaaabb", config, EngineOptions()) == [
        [(0,), (2,), (3,), (4,), (1,), (5,), (6,)],
        [(0, 2), (3, 4), (1, 5, 6)],
        [(0, 2, 3, 4), (1, 5, 6)],
    ]
    assert [len(units[0]) for units in all_degrees("a" * 8, config, EngineOptions())] == [1, 2, 4]


def test_reproducible_runs_are_measured_with_the_degrees_that_they_allow():
    config = SimpleNamespace(layers=[SimpleNamespace(mixer=SimpleNamespace(check=lambda degree: None))])

    def degrees(reproducible: str, num_ranks: int) -> list[int]:
        options = EngineOptions.from_flat({"reproducible": reproducible})
        return [len(units[0]) for units in all_degrees("a" * num_ranks, config, options)]

    assert degrees("off", 24) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert [degrees("on", count) for count in (24, 10, 5)] == [[1, 2, 3, 4], [1, 2], [1]]


@pytest.mark.parametrize(("reproducible", "sent"), [(False, [torch.bfloat16]), (True, [torch.float32])])
def test_sums_over_ranks_are_measured_as_the_layers_make_them(reproducible, sent):
    calls = []
    tp = SimpleNamespace(
        rank=0,
        size=2,
        all_reduce=lambda partial: calls.append(partial.dtype) or partial,
        all_gather=lambda own: calls.append(own.dtype) or [own, own.clone()],
    )
    layout = SimpleNamespace(reproducible=reproducible, config=SimpleNamespace(hidden_size=64))
    assert sum_over_ranks(layout, tp)(torch.zeros(3, 64, dtype=torch.bfloat16)).shape == (3, 64)
    assert calls == sent


@pytest.mark.parametrize(
    ("sizes", "text"),
    [((3,), "--tensor-parallel-size 3 does not divide the number of ranks on node-0, 4"), ((2, 2), "give one number")],
)
def test_degree_that_does_not_fit_the_nodes_is_refused(sizes, text):
    with pytest.raises(UserError, match=text):
        split_machines(["node-0"] * 4, EngineOptions.from_flat({"tensor_parallel_size": sizes}))
