"""Clusters for tests of the planner, and a search through all layouts of one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import msgspec
from hypothesis import strategies as st

from labinfer.planner.cluster import Cluster, Machine, MachinePairLink, NetworkLink
from labinfer.planner.costs import HostCosts, LayerCosts, Points
from labinfer.planner.objective import CacheDemand, EngineLimits, Stage, has_room, make_criteria
from labinfer.planner.problem import Problem, Solution
from labinfer.planner.units import FormLevel
from labinfer.planner.workload import MeanRequest, RequestLengths, Workload

LAN = NetworkLink(3e-4, 1.25e8)
LIMITS = EngineLimits(max_model_len=64, max_num_seqs=4, block_size=1)


def make_costs(speed: float = 1.0, num_layers: int = 8, **changes) -> HostCosts:
    """A host that is so many times as fast as one with a millisecond a layer."""
    layer = LayerCosts(
        linear=Points([1, 8, 64, 512], [second / speed for second in (1e-3, 1.1e-3, 3e-3, 2e-2)]),
        small=Points([1], [2e-5 / speed]),
        decode=(1e-5 / speed, 1e-6 / speed, 2e-8 / speed),
        chunk=(2e-5 / speed, 1e-6 / speed, 1e-9 / speed),
    )
    values = {
        "name": "kind",
        "model": "m",
        "dtype": "float32",
        "memory": 1 << 40,
        "layers": ["dense"] * num_layers,
        "layer_kinds": {"dense": layer},
        "layer_bytes": {"dense": 1 << 20},
        "kv_bytes": {"dense": 1 << 10},
        "hidden_bytes": 2048,
        "embedding_bytes": 1 << 20,
        "head_bytes": 1 << 20,
        "head": Points([1, 64], [2e-3 / speed, 6e-3 / speed]),
        "embed": Points([1, 64], [1e-5, 2e-5]),
        "fixed": 5e-4,
    }
    return HostCosts(**values | changes)


FORMS = (("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"))


def make_machine(name: str, memory: int, forms=FORMS, num_layers: int = 8) -> Machine:
    """Layers of 4, 2 and 1 MiB, between ends that have none; fewer bits are faster, too."""
    bits = {"none": 4, "int8": 2, "int4": 1}
    costs = [
        make_costs(
            4 / bits[quantization],
            num_layers,
            dtype=dtype,
            quantization=quantization,
            layer_bytes={"dense": bits[quantization] << 20},
            memory=memory << 20,
            embedding_bytes=0,
            head_bytes=0,
        )
        for dtype, quantization in forms
    ]
    return Machine(name=name, costs=costs)


def make_cluster(*speeds: float, **changes) -> Cluster:
    """Machines a, b, … of such speeds, with the same link between all."""
    machines = [
        Machine(name=name, costs=[make_costs(speed, **changes)])
        for name, speed in zip("abcdefghijkl", speeds, strict=False)
    ]
    return Cluster(machines=machines, default_link=LAN)


def make_problem(cluster: Cluster, prompt: int = 512, output: int = 128, **changes) -> Problem:
    request = Workload((RequestLengths(prompt=prompt, output=output),)).mean
    values = {
        "cluster": cluster,
        "request": request,
        "limits": EngineLimits(max_model_len=4096),
        "objective": "throughput",
    }
    return Problem(**values | changes)


def all_layouts(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """Every order of every set of machines with every contiguous division of the layers."""
    machines = [machine for machine in problem.cluster.machines if machine.name not in problem.excluded]
    count = len(machines[0].costs[0].layers)
    for size in range(1, min(len(machines), count) + 1):
        for order in itertools.permutations(machines, size):
            names = [machine.name for machine in order]
            if problem.first not in ("", names[0]) or not problem.required <= set(names):
                continue
            for inner in itertools.combinations(range(1, count), size - 1):
                cuts = itertools.pairwise((0, *inner, count))
                yield tuple(
                    Stage(machine=machine.name, costs=machine.costs[0], begin=begin, end=end)
                    for machine, (begin, end) in zip(order, cuts, strict=True)
                )


def try_all(problem: Problem) -> Solution | None:
    """The best layout, by trying every one with every criterion."""
    best = None
    criteria = list(make_criteria(problem.objective, problem.request, problem.limits, len(problem.cluster.machines)))
    for stages in all_layouts(problem):
        for criterion in criteria:
            fewest, most = criterion.num_stages
            context = criterion.num_seqs * problem.request.decode_context
            tokens = max(context, problem.limits.max_model_len, problem.kv_tokens)
            if not fewest <= len(stages) <= most or not fits(
                stages, problem.limits, CacheDemand(tokens, criterion.num_seqs)
            ):
                continue
            value = criterion.evaluate(stages, problem.cluster)
            if best is None or value < best.value:
                best = Solution(value, criterion, stages)
    return best


def try_all_forms(problem: Problem) -> Solution | None:
    """The best layout among those of the lowest ``FormLevel``, by trying every choice of forms."""
    own = [
        [costs for form in problem.dtypes for costs in machine.costs if (costs.dtype, costs.quantization) == form]
        for machine in problem.cluster.machines
    ]

    def level_of(places: tuple[int, ...]) -> FormLevel:
        return FormLevel(max(places), sum(places))

    choices = sorted(itertools.product(*map(range, map(len, own))), key=level_of)
    for level, group in itertools.groupby(choices, key=level_of):
        solutions = []
        for choice in group:
            machines = [
                msgspec.structs.replace(machine, costs=[costs[place]])
                for machine, costs, place in zip(problem.cluster.machines, own, choice, strict=True)
            ]
            cluster = msgspec.structs.replace(problem.cluster, machines=machines)
            solutions.append(try_all(replace(problem, cluster=cluster)))
        if found := [solution for solution in solutions if solution is not None]:
            return replace(min(found, key=lambda solution: solution.value), level=level)
    return None


def fits(stages: tuple[Stage, ...], limits: EngineLimits, room: CacheDemand) -> bool:
    last = len(stages) - 1
    return all(
        has_room(stage.costs, stage.layers, limits, room, is_first=number == 0, is_last=number == last)
        for number, stage in enumerate(stages)
    )


def seconds(most: float) -> st.SearchStrategy[float]:
    """Times in steps, so that equal ones come up."""
    return st.integers(0, 20).map(lambda step: step * most / 20)


@st.composite
def points(draw, most: float) -> Points:
    low, step = draw(seconds(most)) + most / 100, draw(seconds(most))
    return Points([1, 2, 3, 512], [low, low, low + step, low + 20 * step])


def part_of(linear: Points, part: float) -> Points:
    """So much of the seconds, and nothing for no rows."""
    return Points([0, *linear.sizes], [0.0, *(part * seconds for seconds in linear.seconds)])


@st.composite
def layer_costs(draw) -> LayerCosts:
    decode = (draw(seconds(1e-3)), draw(seconds(1e-4)), draw(seconds(1e-6)))
    return LayerCosts(
        linear=draw(points(1e-2)),
        small=Points([], []),
        decode=decode,
        chunk=(draw(seconds(1e-3)), draw(seconds(1e-4)), 0.0),
    )


@st.composite
def problems(draw, kinds: tuple[str, ...] = ("dense",), most_machines: int = 4, most_layers: int = 7) -> Problem:
    layers = draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=most_layers))
    classes = draw(
        st.lists(
            st.builds(
                lambda costs, memory, fixed, head, embed, part, tp_size: make_costs(
                    layers=layers,
                    layer_kinds=dict(zip(kinds, costs, strict=True)),
                    layer_bytes={kind: 100 + 50 * number for number, kind in enumerate(kinds)},
                    kv_bytes={kind: 1 + number for number, kind in enumerate(kinds)},
                    embedding_bytes=60,
                    head_bytes=80,
                    shared_bytes=40,
                    memory=memory,
                    fixed=fixed,
                    head=head,
                    embed=embed,
                    skipped=part_of(costs[kinds.index(layers[-1])].linear, part),
                    tp_size=tp_size,
                ),
                st.lists(layer_costs(), min_size=len(kinds), max_size=len(kinds)),
                st.sampled_from((250, 500, 1000, 5000)),
                seconds(2e-3),
                points(2e-2),
                points(1e-4),
                st.sampled_from((0.0, 0.5, 0.9)),
                st.sampled_from((1, 1, 3)),
            ),
            min_size=1,
            max_size=most_machines,
        )
    )
    machines = [
        Machine(name=f"m{number}", costs=[draw(st.sampled_from(classes))])
        for number in range(draw(st.integers(1, most_machines)))
    ]
    names = [machine.name for machine in machines]
    link = st.builds(NetworkLink, seconds(1e-2), st.sampled_from((1e4, 1e6, 1e8)))
    pairs = [
        MachinePairLink(a=a, b=b, link=draw(link)) for a, b in itertools.combinations(names, 2) if draw(st.booleans())
    ]
    request = MeanRequest(
        prompt=draw(st.integers(1, 300)),
        output=draw(st.integers(1, 40)),
        decode_context=draw(st.integers(1, 60)),
        prompt_context=draw(st.integers(0, 100)),
    )
    return Problem(
        cluster=Cluster(machines=machines, links=pairs, default_link=draw(link)),
        request=request,
        limits=LIMITS,
        objective=draw(st.sampled_from(("throughput", "latency"))),
        first=draw(st.sampled_from(("", names[0]))),
        required=frozenset(draw(st.sampled_from(((), names[-1:])))),
    )


@st.composite
def problems_of_forms(draw) -> Problem:
    """Machines that were probed in one or several of three forms; no two are alike, and of some the memory is scarce."""
    problem = draw(problems(most_machines=3, most_layers=5))
    forms = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"))
    machines = []
    for number, machine in enumerate(problem.cluster.machines):
        memory = draw(st.sampled_from((200, 300, 400, 600))) + number
        costs = [
            msgspec.structs.replace(
                machine.costs[0],
                dtype=dtype,
                quantization=quantization,
                memory=memory,
                layer_bytes={"dense": 100 >> place},
                fixed=draw(seconds(2e-3)),
            )
            for place, (dtype, quantization) in enumerate(forms)
        ]
        probed = draw(st.lists(st.sampled_from(costs), min_size=1, max_size=3, unique_by=lambda each: id(each)))
        machines.append(msgspec.structs.replace(machine, costs=probed))
    cluster = msgspec.structs.replace(problem.cluster, machines=machines)
    return replace(problem, cluster=cluster, dtypes=tuple(draw(st.permutations(forms))))
