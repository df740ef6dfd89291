"""Clusters from files and flags, and the lines that refuse wrong ones."""

from __future__ import annotations

import msgspec
import pytest

from labinfer.base.errors import UserError
from labinfer.planner.cluster import Cluster, Machine, MachinePairLink, NetworkLink, parse_link
from labinfer.planner.costs import HostCosts, LayerCosts, Points

LAYER = LayerCosts(linear=Points([1], [1e-3]), small=Points([], []), decode=(0.0, 0.0, 0.0), chunk=(0.0, 0.0, 0.0))


def make_costs(**changes) -> HostCosts:
    values = {
        "name": "kind",
        "model": "m",
        "dtype": "float32",
        "memory": 1000,
        "layers": ["dense"] * 4,
        "layer_kinds": {"dense": LAYER},
        "layer_bytes": {"dense": 10},
        "kv_bytes": {"dense": 1},
        "hidden_bytes": 64,
        "embedding_bytes": 5,
        "head_bytes": 5,
        "head": Points([1], [1e-3]),
        "embed": Points([1], [1e-5]),
        "fixed": 1e-4,
    }
    return HostCosts(**values | changes)


def write(path, *machines: Machine, **rest) -> str:
    path.write_bytes(msgspec.json.encode(Cluster(machines=list(machines), **rest)))
    return str(path)


def machine(name: str, **changes) -> Machine:
    return Machine(name=name, costs=[make_costs(**changes)])


def test_files_and_flags_are_joined_and_flags_win(tmp_path):
    a = write(tmp_path / "a.json", machine("a"), links=[])
    both = write(
        tmp_path / "b.json",
        machine("b"),
        machine("c"),
        links=[MachinePairLink(a="b", b="c", link=NetworkLink(1.0, 1.0))],
    )
    cluster = Cluster.read([a, both], ["2gbit,1ms", "c:b=80mbit,500us"])
    assert [machine.name for machine in cluster.machines] == ["a", "b", "c"]
    assert cluster.link("b", "c") == cluster.link("c", "b") == NetworkLink(5e-4, 1e7)
    assert cluster.link("a", "b") == NetworkLink(1e-3, 2.5e8)


def test_probes_of_the_same_machine_are_joined(tmp_path):
    forms = [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}, {"tp_size": 2}]
    files = [
        write(tmp_path / f"{number}.json", msgspec.structs.replace(machine("a", **form), num_ranks=2))
        for number, form in enumerate(forms)
    ]
    (joined,) = Cluster.read(files).machines
    assert joined.name == "a" and joined.ranks == 2
    assert joined.costs == [make_costs(**form) for form in forms]
    with pytest.raises(
        UserError,
        match=r"'a' occurs twice in the cluster in bfloat16 \(int8\) with tp 1; give each machine a unique name",
    ):
        Cluster.read([*files, files[2]])
    one = msgspec.structs.replace(machine("a", dtype="float16"), num_ranks=1)
    with pytest.raises(
        UserError, match="'a' was probed with 2 ranks and with 1; probe it with the same number of ranks"
    ):
        Cluster.read([*files, write(tmp_path / "one.json", one)])


def test_equal_machines_are_counted_and_named(tmp_path):
    many = msgspec.structs.replace(machine("gpu"), count=3)
    cluster = Cluster.read([write(tmp_path / "many.json", many)], ["1gbit,0.3ms"])
    assert [machine.name for machine in cluster.machines] == ["gpu-0", "gpu-1", "gpu-2"]


def test_hop_inside_a_machine_costs_nothing_unless_it_was_measured():
    assert Cluster(machines=[machine("a")]).link("a", "a").seconds(1e9) == 0.0
    own = MachinePairLink(a="a", b="a", link=NetworkLink(1e-5, 1e10))
    assert Cluster(machines=[machine("a")], links=[own]).link("a", "a") == own.link


def test_link_takes_its_latency_and_the_time_of_its_bytes():
    assert NetworkLink(1e-3, 1e6).seconds(500) == pytest.approx(1.5e-3)


@pytest.mark.parametrize(
    "text",
    ["", "a:b", "a:b=1gbit", "a:b=0.3ms,1gbit", "a=1gbit,1ms", "a:b:c=1gbit,1ms", ":b=1gbit,1ms", "1gbit,1.1.1ms"],
)
def test_wrong_link_is_refused_with_an_example(text):
    with pytest.raises(UserError, match="--link a:b=1gbit,0.3ms"):
        parse_link(text)


def test_link_without_a_rate_is_refused():
    with pytest.raises(UserError, match="rate above 0"):
        parse_link("a:b=0mbit,1ms")


@pytest.mark.parametrize(
    ("machines", "links", "text"),
    [
        ([], [], "no machine"),
        ([machine("a"), machine("a")], ["1gbit,1ms"], "'a' occurs twice in the cluster"),
        ([machine("a"), machine("b")], [], "no link between a and b"),
        ([machine("a"), machine("b")], ["a:c=1gbit,1ms", "1gbit,1ms"], "names c, but machines are a, b"),
        ([machine("a"), machine("b", model="other")], ["1gbit,1ms"], "a and b were measured with different models"),
        ([machine("a", fixed=-1.0)], [], "fixed in the costs of kind has -1"),
        ([Machine(name="a", costs=[])], [], "machine a has no costs"),
        ([machine("a"), machine("")], ["1gbit,1ms"], "a machine of the cluster has no name"),
        ([msgspec.structs.replace(machine("a"), count=0)], [], "machine a has a count of 0"),
        ([machine("a"), msgspec.structs.replace(machine("b"), count=-1)], [], "machine b has a count of -1"),
        ([msgspec.structs.replace(machine("a"), num_ranks=-2)], [], "machine a has -2 ranks"),
        ([msgspec.structs.replace(machine("a"), block_size=-16)], [], "machine a has a block_size of -16 tokens"),
        (
            [Machine(name="a", costs=[make_costs(tp_size=2, all_reduce=Points([1], [0.0]))], num_ranks=1)],
            [],
            "but 1 ranks",
        ),
    ],
)
def test_wrong_cluster_is_refused_in_one_line(tmp_path, machines, links, text):
    with pytest.raises(UserError, match=text) as error:
        Cluster.read([write(tmp_path / "cluster.json", *machines)], links)
    assert "\n" not in str(error.value)


def test_file_that_is_no_cluster_is_refused_by_its_name(tmp_path):
    with pytest.raises(UserError, match="cannot read .*absent.json: No such file"):
        Cluster.read([str(tmp_path / "absent.json")])
    path = tmp_path / "other.json"
    path.write_text('{"machines": [{"name": "a", "costs": [{"name": "kind"}]}]}')
    with pytest.raises(UserError, match="other.json is not a cluster file: .*missing required field"):
        Cluster.read([str(path)])
    path.write_text("{")
    with pytest.raises(UserError, match="is not a cluster file"):
        Cluster.read([str(path)])
