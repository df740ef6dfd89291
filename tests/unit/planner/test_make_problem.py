"""Questions to the search: what the options allow, and requests that fit in short contexts."""

from __future__ import annotations

import pytest
from msgspec import structs
from random_clusters import LAN, make_costs

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.planner.cluster import Cluster, Machine
from labinfer.planner.make_problem import make_problem, refuse_draft_rank, refuse_drafters

FORMS = [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")]


def make_mixed(*forms: tuple[str, str]) -> Cluster:
    costs = [make_costs(dtype=dtype, quantization=quantization) for dtype, quantization in forms]
    return Cluster(machines=[Machine(name="a", costs=costs), Machine(name="b", costs=costs[:1])], default_link=LAN)


@pytest.mark.parametrize(
    ("forms", "options", "dtypes"),
    [
        (FORMS[:2], {}, ()),
        (FORMS, {"quantization": "none"}, tuple(FORMS[:2])),
        (FORMS[:2], {"dtype": "bfloat16"}, (FORMS[1],)),
        (FORMS[:2], {"dtype": "bfloat16,float32"}, (FORMS[1], FORMS[0])),
        (FORMS, {"dtype": "auto", "quantization": "int8"}, (FORMS[2],)),
        (FORMS, {"quantization": "none,int8"}, tuple(FORMS)),
        (FORMS, {"quantization": "int8,none"}, (FORMS[2], *FORMS[:2])),
        (FORMS, {"dtype": "bfloat16,float32", "quantization": "none,int8"}, (FORMS[1], FORMS[0], FORMS[2])),
        (FORMS, {"dtype": "bfloat16", "quantization": "none,int4"}, (FORMS[1],)),
        ([FORMS[2], *FORMS[:2]], {"quantization": "auto,int8"}, (*FORMS[:2], FORMS[2])),
        (FORMS[2:], {}, ()),
        (FORMS[2:], {"dtype": "bfloat16"}, (FORMS[2],)),
    ],
)
def test_dtype_and_quantization_are_those_that_are_given(forms, options, dtypes):
    assert make_problem(make_mixed(*forms), EngineOptions.from_flat(options)).dtypes == dtypes


@pytest.mark.parametrize(
    ("forms", "options", "text"),
    [
        (FORMS, {}, "the planner never quantizes on its own; choose with -q"),
        (
            FORMS[:1],
            {"dtype": "float16"},
            r"--dtype float16 --quantization auto: machines were probed in float32 \(none\) only",
        ),
        (FORMS[:2], {"quantization": "int4"}, "--dtype auto --quantization int4: machines were probed in float32"),
    ],
)
def test_form_that_was_not_probed_is_refused_in_one_line(forms, options, text):
    with pytest.raises(UserError, match=text) as error:
        make_problem(make_mixed(*forms), EngineOptions.from_flat(options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [({"model": "demo-draft"}, "of the draft model demo-draft"), ({"method": "mtp"}, "of the MTP layer")],
)
def test_what_drafts_with_weights_is_refused_with_files_of_costs(config, text):
    refuse_drafters(EngineOptions.from_flat({"speculative_config": {"method": "ngram"}}))
    with pytest.raises(UserError, match=text):
        refuse_drafters(EngineOptions.from_flat({"speculative_config": config}))


def test_draft_rank_is_refused_where_a_plan_chooses_the_ranks():
    refuse_draft_rank(EngineOptions.from_flat({"speculative_config": {"model": "demo-draft"}}), "--layout auto")
    with pytest.raises(UserError, match="--layout auto chooses the spare ranks itself; leave it or draft_rank 2"):
        refuse_draft_rank(
            EngineOptions.from_flat({"speculative_config": {"model": "demo-draft", "draft_rank": 2}}), "--layout auto"
        )


@pytest.mark.parametrize(("length", "prompt", "output"), [(4096, 512, 128), (640, 512, 128), (100, 80, 20), (2, 1, 1)])
def test_usual_requests_fit_in_the_context(length, prompt, output):
    problem = make_problem(make_mixed(FORMS[0]), EngineOptions(), max_position=length)
    assert (problem.request.prompt, problem.request.output) == (prompt, output)
    assert problem.limits.max_model_len == length


def test_workload_that_is_longer_than_the_model_allows_is_refused(tmp_path):
    path = tmp_path / "day.jsonl"
    path.write_text('{"prompt_tokens": 5000, "output_tokens": 50}\n')
    cluster = make_mixed(FORMS[0])
    assert make_problem(cluster, EngineOptions(), workload=str(path)).limits.max_model_len == 5050
    with pytest.raises(UserError, match="the context length of 1000"):
        make_problem(cluster, EngineOptions(), workload=str(path), max_position=1000)


def test_blocks_are_the_largest_that_a_device_prefers_unless_a_size_is_given():
    """As those of a launch on the machines, or else the KV cache capacity of the plan would not apply to it."""
    mixed = make_mixed(FORMS[0])
    first, second = mixed.machines
    machines = [structs.replace(first, block_size=16), structs.replace(second, block_size=128)]
    problem = make_problem(structs.replace(mixed, machines=machines), EngineOptions())
    assert problem.limits.block_size == 128 and dict(problem.options)["block_size"] == "128"
    given = EngineOptions.from_flat({"block_size": 32})
    assert make_problem(structs.replace(mixed, machines=machines), given).limits.block_size == 32
    assert make_problem(mixed, EngineOptions()).limits.block_size == 16
