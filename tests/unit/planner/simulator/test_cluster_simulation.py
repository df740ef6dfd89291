"""Simulations of clusters: times from costs against sums by hand, KV blocks, layouts that do not fit, and their speed."""

from __future__ import annotations

import json

import msgspec
import pytest
from effort import effort
from simulated import make_cluster, make_costs, make_plan, topology

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.plan import SequenceStart, TokenSampling
from labinfer.cli.bench.options import BenchOptions, LoadOptions, ServeOptions
from labinfer.cli.bench.serve import ServeBenchmark
from labinfer.cli.main import main
from labinfer.planner.cluster import Cluster, Machine, NetworkLink
from labinfer.planner.costs import HostCosts, Points
from labinfer.planner.objective import RESERVE, Criterion, Stage
from labinfer.planner.overheads import Overheads, plan_bytes
from labinfer.planner.simulator.cluster_times import ClusterTimes
from labinfer.planner.simulator.plan_times import Forward
from labinfer.planner.simulator.simulation import Simulation, cluster_simulation
from labinfer.planner.step_shape import StepShape

OVERHEADS = Overheads(
    schedule=1.0,
    schedule_sequence=0.1,
    schedule_token=0.01,
    broadcast=0.25,
    send_plan=0.5,
    delivery=0.125,
    decode=0.0625,
    lead=2.0,
    prepare_sequence=0.5,
    send=4.0,
)
FAST, SLOW = make_costs(), make_costs(0.5)


def make_stages(*parts: tuple[str, HostCosts, int]) -> list[Stage]:
    """Stages of so many layers, with ``OVERHEADS``."""
    stages: list[Stage] = []
    for machine, costs, count in parts:
        begin, costs = stages[-1].end if stages else 0, msgspec.structs.replace(costs, overheads=OVERHEADS)
        stages.append(Stage(machine=machine, costs=costs, begin=begin, end=begin + count))
    return stages


@pytest.fixture
def uneven() -> Cluster:
    """A machine of two ranks and one of half their speed with one."""
    pair = msgspec.structs.replace(FAST, tp_size=2, all_reduce=Points([1], [1e-5]))
    return make_cluster(Machine(name="a", costs=[FAST, pair], num_ranks=2), Machine(name="b", costs=[SLOW]))


def test_times_of_a_plan_are_those_of_its_parts(uneven):
    stages = make_stages(("a", FAST, 6), ("b", SLOW, 2))
    source = ClusterTimes(topology(2), stages, uneven)
    plan, shape = make_plan(0), StepShape(1, 1, (), 1)
    times = source.times(plan)
    assert times.schedule == pytest.approx(1.1) and times.broadcast == 0.75
    link = NetworkLink(1e-3, 1e8)
    assert times.deliveries[1] == pytest.approx(0.25 + 0.5 + 0.125 + 0.0625 + link.seconds(plan_bytes(plan)))
    first, last = times.stages
    assert first.prepare + first.run == pytest.approx(
        FAST.step_seconds(shape, {"dense": 6}, is_first=True, is_last=False)
    )
    assert last.prepare + last.run + last.sample == pytest.approx(
        SLOW.step_seconds(shape, {"dense": 2}, is_first=False, is_last=True)
    )
    assert (first.prepare, first.sample, first.send, first.lead) == (FAST.fixed, 0.0, 4.0, 2.0)
    assert (last.prepare, last.sample) == (SLOW.fixed, pytest.approx(2e-4))
    assert times.hops[0] == (2048 / 1e8, 1e-3) and times.hops[1] == (plan.result_bytes / 1e8, 1e-3)


def test_single_stage_sends_nothing():
    cluster = make_cluster(Machine(name="a", costs=[FAST]))
    times = ClusterTimes(topology(1), make_stages(("a", FAST, 8)), cluster).times(make_plan(0))
    assert times.broadcast == 0.0 and times.stages[0].send == 0.0


def test_started_prompt_costs_by_its_tokens(uneven):
    stages = make_stages(("a", FAST, 6), ("b", SLOW, 2))
    source = ClusterTimes(topology(2), stages, uneven)
    start = SequenceStart(10, [1] * 1000, TokenSampling(num_prompt_tokens=1000))
    plan = make_plan(0)
    with_start = msgspec.structs.replace(plan, starts=[start])
    assert source.times(with_start).schedule == pytest.approx(1.1 + 10.0)
    assert plan_bytes(with_start) >= plan_bytes(plan) + 1000


def test_every_tensor_parallel_rank_is_sent_plans_and_activations(uneven):
    stages = make_stages(("b", SLOW, 2), ("a", uneven.machines[0].costs[1], 6))
    times = ClusterTimes(topology(2, (1, 2)), stages, uneven).times(make_plan(0))
    assert times.broadcast == 0.25 + 2 * 0.5 and times.deliveries[1] >= 0.25 + 2 * 0.5
    assert times.hops[0].transfer == 2 * 2048 / 1e8


def test_hop_takes_as_long_in_a_plan_as_in_a_simulation(uneven):
    pair, plan = uneven.machines[0].costs[1], make_plan(0)
    hop = ClusterTimes(topology(2, (1, 2)), make_stages(("b", SLOW, 2), ("a", pair, 6)), uneven).times(plan).hops[0]
    steps = ((1.0, StepShape.from_plan(plan)),)
    criterion, link = Criterion(path=steps, bottleneck=steps, adds=False), NetworkLink(1e-3, 1e8)
    assert criterion.transfer_seconds(SLOW, pair, link) == pytest.approx(hop.transfer)
    assert criterion.hop_seconds(SLOW, pair, link) == pytest.approx(hop.transfer + hop.latency)


def test_tokens_come_back_over_the_link_to_rank_0(uneven):
    link = NetworkLink(0.5, 1e9)
    cluster = make_cluster(*uneven.machines, link=link)
    stages = make_stages(("b", SLOW, 2), ("a", FAST, 6))
    beside = ClusterTimes(topology(2, ranks=(1, 0)), stages, cluster).times(make_plan(0))
    assert beside.deliveries[0] >= 0.5 and beside.hops[-1].latency == 0.0
    away = ClusterTimes(topology(2), stages, cluster).times(make_plan(0))
    assert away.hops[-1].latency == 0.5


def test_many_ranks_forward_plans():
    """64 stages of 8: rank 0 sends a plan to its stage and to stage 1, whose ranks send it to stages 1 to 9."""
    wide = make_costs(num_layers=128, tp_size=8, all_reduce=Points([1], [1e-5]))
    cluster = make_cluster(Machine(name="node", costs=[wide], count=64))
    stages = make_stages(*((machine.name, wide, 2) for machine in cluster.machines))
    times = ClusterTimes(topology(64, (8,) * 64), stages, cluster).times(make_plan(0))
    assert times.broadcast == 0.25 + 8 * 0.5
    link = NetworkLink(1e-3, 1e8).seconds(plan_bytes(make_plan(0)))
    assert times.deliveries[1] == pytest.approx(0.25 + 8 * 0.5 + 0.1875 + link) and not any(times.deliveries[2:])
    assert times.forwards[1] == [Forward(0, pytest.approx(7 * 0.5 + 0.1875 + link))]
    assert [forward.stage for forward in times.forwards[9]] == [1] and times.forwards[9][0].seconds > 8 * 0.5
    assert [[forward.stage for forward in forwards] for forwards in times.forwards[62:]] == [[7], [7]]
    assert [stage.lead for stage in times.stages] == [2.0 + 8 * 0.5] * 8 + [2.0] * 56


def test_step_times_are_those_that_a_start_would_measure(uneven):
    stages = make_stages(("a", FAST, 6), ("b", SLOW, 2))
    times = ClusterTimes(topology(2), stages, uneven).step_times(max_num_seqs=10)
    assert times.sizes == [1, 8]
    shape = StepShape(8, 8, (), 8)
    seconds = SLOW.step_seconds(shape, {"dense": 2}, is_first=False, is_last=True)
    assert times.by_stage[1][1] == pytest.approx(seconds + 7 * 0.5)
    assert times.hop == pytest.approx(1e-3 + 2048 / 1e8 / 2)


# Layouts on clusters.


def simulate(cluster: Cluster, **engine) -> Simulation:
    return cluster_simulation(cluster, EngineOptions.from_flat({"memory_utilization": 1.0} | engine))


def test_ranks_count_up_from_machine_to_machine(uneven):
    simulation = simulate(uneven)
    assert simulation.hosts == ("a", "a", "b")
    assert simulation.spec.num_stages == 3 and simulation.spec.step_times is not None
    assert simulate(uneven, tensor_parallel_size="2,1", layers="6,2").hosts == ("a", "b")
    assert simulate(uneven, ranks="2,0").hosts == ("b", "a")


def test_kv_blocks_are_those_of_the_stage_with_the_least_room(uneven):
    simulation = simulate(uneven, ranks="0,2", layers="6,2")
    rooms = [int(((1 << 30) - weights * (1 << 20)) * (1 - RESERVE)) for weights in (7, 3)]
    blocks = [room // (16 * 1024 * layers) for room, layers in zip(rooms, (6, 2), strict=True)]
    assert simulation.spec.num_blocks == min(blocks) == blocks[0]
    assert simulation.spec.max_model_len == 16 * min(blocks)
    half = simulate(uneven, ranks="0,2", layers="6,2", memory_utilization=0.5)
    assert half.spec.num_blocks == rooms[0] // 2 // (16 * 1024 * 6)
    assert simulate(uneven, num_kv_blocks=10).spec.num_blocks == 10
    assert simulate(uneven, max_model_len=160, max_num_seqs=4).spec.num_blocks == 40


def test_states_take_their_part_of_the_cache():
    costs = make_costs(state_bytes={"dense": 1 << 20})
    spec = simulate(make_cluster(Machine(name="a", costs=[costs])), max_num_seqs=4).spec
    assert spec.num_states == 8
    room = int(((1 << 30) - 10 * (1 << 20)) * (1 - RESERVE)) - 64 * (1 << 20)
    assert spec.num_blocks == room // (16 * 1024 * 8)


def test_stages_are_simulated_in_precisions_of_their_own():
    forms = [make_costs(), make_costs(2.0, quantization="int8")]
    cluster = make_cluster(Machine(name="a", costs=forms), Machine(name="b", costs=forms))
    mixed, plain, rounded = (
        simulate(cluster, quantization=given).source.times(make_plan(0)).stages
        for given in ("none,int8", "none", "int8")
    )
    assert [stage.run for stage in mixed] == [plain[0].run, rounded[1].run]
    assert rounded[1].run < 0.6 * plain[1].run
    with pytest.raises(UserError, match="--quantization none,int8,none has 3 values for 2 stages"):
        simulate(cluster, quantization="none,int8,none")


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"tensor_parallel_size": 3, "pipeline_parallel_size": 1}, "needs 3 ranks on one node"),
        (
            {"tensor_parallel_size": "1,2", "ranks": "2,0,1", "dtype": "bfloat16"},
            "machine b has no costs for -tp 1 --dtype bf",
        ),
        (
            {"quantization": "int8"},
            "machine a has no costs for -tp 1 --quantization int8, only for tp 1 in float32",
        ),
        ({"layers": "1,1,1"}, "--layers 1,1,1 adds up to 3"),
        (
            {"pipeline_parallel_size": 2},
            "needs 2 ranks, but there are 3; probe machines with 2 ranks in total or change -tp and -pp",
        ),
        ({"pipeline_parallel_size": 1}, "needs 1 rank, but there are 3; probe machines with 1 rank in total or change"),
    ],
)
def test_layout_that_does_not_go_with_the_cluster_is_refused(uneven, engine, expected):
    with pytest.raises(UserError) as caught:
        simulate(uneven, **engine)
    assert expected in str(caught.value)


def test_stage_without_room_is_named(uneven):
    small = make_costs(memory=3 << 20)
    cluster = make_cluster(Machine(name="a", costs=[FAST]), Machine(name="b", costs=[small]))
    with pytest.raises(UserError, match="stage 1 on b has too little memory for layers 4 to 7"):
        simulate(cluster)
    assert simulate(cluster, layers="7,1").spec.num_blocks == int((1 << 20) * (1 - RESERVE)) // (16 * 1024)


# Whole runs.


def measure(
    simulation: Simulation, num_prompts: int, rate: float = float("inf"), max_concurrency: int = 0, **lengths
) -> dict:
    """The figures of a run."""
    options = EngineOptions.from_flat({"max_num_seqs": 512})
    model = simulation.make_model(options.cache, options.scheduler)
    benchmark = ServeBenchmark(
        BenchOptions(**lengths),
        LoadOptions(num_prompts=num_prompts),
        ServeOptions(request_rate=rate, max_concurrency=max_concurrency),
    )
    benchmark.prepare(model)
    return benchmark.run(model, lambda: None).values


def test_uneven_stages_with_layers_by_their_speed_are_faster_than_even_ones(uneven):
    even, by_speed = (
        measure(simulate(uneven, ranks="0,2", layers=layers), 16, input_len=32, output_len=32)
        for layers in ("4,4", "5,3")
    )
    assert by_speed["output_throughput"] > 1.2 * even["output_throughput"]


def test_faster_link_shortens_the_time_of_a_token(uneven):
    fast, slow = (
        measure(simulate(make_cluster(*uneven.machines, link=NetworkLink(latency, 1e8)), ranks="0,2"), 1, output_len=16)
        for latency in (1e-3, 6e-3)
    )
    assert slow["median_tpot_ms"] - fast["median_tpot_ms"] == pytest.approx(10.0, rel=0.01)


def test_closed_loop_sends_a_request_when_another_is_done(uneven):
    simulation = simulate(uneven, ranks="0,2")
    alone = measure(simulation, 1, output_len=16)
    in_turn = measure(simulation, 5, output_len=16, max_concurrency=1)
    assert in_turn["duration"] == pytest.approx(5 * alone["duration"], rel=0.01)
    assert in_turn["p99_ttft_ms"] == pytest.approx(alone["p99_ttft_ms"], rel=0.05)


def test_shared_prefixes_of_a_trace_are_found_by_the_prefix_cache(tmp_path, files):
    path, out = tmp_path / "mooncake.jsonl", tmp_path / "out.json"
    requests = [
        {"timestamp": 60_000 * number, "input_length": 1000, "output_length": 4, "hash_ids": [5, 6 + number]}
        for number in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, requests)), encoding="utf-8")
    flags = ["simulate", "--cluster", files, "--link", "1gbit,1ms", "--workload", str(path), "--output-json", str(out)]
    assert main([*flags, "--max-num-seqs", "8"]) == 0
    values = json.loads(out.read_bytes())
    assert values["cached_tokens"] == 2 * 512
    assert values["duration"] == pytest.approx(120, rel=0.01) and values["request_rate"] == pytest.approx(1 / 60)


@pytest.mark.slow
def test_300_requests_on_two_stages_take_three_seconds():
    cluster = make_cluster(Machine(name="a", costs=[FAST]), Machine(name="b", costs=[SLOW]))
    simulation = simulate(cluster)
    values, yardsticks = effort(lambda: measure(simulation, 300, rate=2.0, input_len=512, output_len=128))
    assert values["completed"] == 300 and values["duration"] > 100
    assert yardsticks <= 100  # 3 s where a yardstick takes 30 ms


@pytest.mark.slow
def test_600_requests_on_64_stages_of_8_ranks_take_a_minute():
    wide = make_costs(num_layers=128, tp_size=8, all_reduce=Points([1], [1e-5]), kv_bytes={"dense": 64})
    cluster = make_cluster(Machine(name="node", costs=[wide], count=64))
    simulation = simulate(cluster, tensor_parallel_size=8, max_num_seqs=512)
    values, yardsticks = effort(lambda: measure(simulation, 600, rate=8.0, input_len=512, output_len=256))
    assert values["completed"] == 600
    assert yardsticks <= 2000


# The command.


@pytest.fixture
def files(tmp_path, uneven) -> str:
    paths = []
    for machine in uneven.machines:
        paths.append(tmp_path / f"{machine.name}.json")
        paths[-1].write_bytes(msgspec.json.encode(Cluster(machines=[machine])))
    return ",".join(map(str, paths))


def test_command_prints_stages_and_writes_the_same_bytes_for_the_same_seed(tmp_path, files, capfd):
    flags = ["simulate", "--cluster", files, "--link", "1gbit,0.3ms", "--ranks", "0,2", "--layers", "5,3"]
    flags += ["--num-prompts", "20", "--request-rate", "10", "--input-len", "40", "--output-len", "10"]
    contents = []
    for name in ("first.json", "second.json"):
        assert main([*flags, "--output-json", str(tmp_path / name)]) == 0
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]
    values = json.loads(contents[0])
    assert [stage["host"] for stage in values["stages"]] == ["a", "b"]
    assert values["measured"] is True and values["completed"] == 20
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["1", "b", "5-7", "1"] in [row[:4] for row in rows]


def test_estimated_costs_are_told(tmp_path, capfd):
    path = tmp_path / "a.json"
    cluster = Cluster(machines=[Machine(name="a", costs=[make_costs(measured=False)])])
    path.write_bytes(msgspec.json.encode(cluster))
    assert main(["simulate", "--cluster", str(path), "--num-prompts", "2", "--output-len", "2"]) == 0
    assert "with estimated costs" in capfd.readouterr().out


def test_chart_and_trace_are_written(tmp_path, files, capfd):
    pytest.importorskip("matplotlib")
    chart, trace = tmp_path / "chart.svg", tmp_path / "trace.json"
    flags = ["simulate", "--cluster", files, "--link", "1gbit,0.3ms", "--num-prompts", "4", "--output-len", "8"]
    assert main([*flags, "--plot", str(chart), "--trace", str(trace)]) == 0
    assert capfd.readouterr().err.splitlines()[-2:] == [f"labinfer: wrote {chart}", f"labinfer: wrote {trace}"]
    assert b"<svg" in chart.read_bytes() and json.loads(trace.read_bytes())["otherData"]["facts"]["num_stages"] == 3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--cluster", "none.json"), "cannot read none.json"),
        (("--cluster", "{files}"), "no link between"),
        (("--cluster", "{files}", "--link", "fast"), "--link fast is not understood"),
        (
            ("--cluster", "{files}", "--link", "1gbit,1ms", "--replay", "x.json"),
            "give either --cluster FILES or --replay",
        ),
        (("--replay", "x.json", "--link", "1gbit,1ms"), "--link needs --cluster"),
        (("--cluster", "{files}", "--link", "1gbit,1ms", "--model", "x"), "unknown option --model"),
        (
            ("--cluster", "{files}", "--link", "1gbit,1ms", "--preemption-mode", "swap"),
            "--preemption-mode swap: --cluster has no swap times",
        ),
        (("--cluster", "{first}", "--output-json", "{first}"), "--output-json {first} is the --cluster {first} file"),
    ],
)
def test_wrong_clusters_are_refused_in_a_line(files, capfd, flags, expected):
    names = {"files": files, "first": files.partition(",")[0]}
    assert main(["simulate", *(flag.format(**names) for flag in flags)]) == 2
    error = capfd.readouterr().err
    assert expected.format(**names) in error and error.count("\n") == 1
