"""With ``--reproducible`` every family's logits and drawn tokens have the same bits on one rank, on pipelines and on all tensor-parallel degrees."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from checkpoints import FAMILIES, KINDS, mixed_prompts
from golden import golden
from launchers import command, finish, start

DRIVER = "tests/cluster/bits_driver.py"
PP, TP, EXPERTS = "pipeline_parallel_size", "tensor_parallel_size", "experts"
LAYOUTS = {
    "tp 2": (2, {TP: 2}),
    "pp 2": (2, {PP: 2}),
    "tp 3": (3, {TP: 3}),
    "tp 2,1": (3, {TP: [2, 1], PP: 2}),
    "tp 4": (4, {TP: 4}),
    "tp 3, whole experts": (3, {TP: 3, EXPERTS: ["whole"]}),
    "tp 2,1, whole experts": (3, {TP: [2, 1], PP: 2, EXPERTS: ["whole"]}),
}
FORMS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 32},
}
SAMPLE = ("qwen2-tied", "qwen3-moe", "gpt-oss", "deepseek-v2-lite", "qwen3.5")
"""Families with a dense MLP, experts, biased experts, latent attention and recurrent states."""
QUICK = ("qwen2-tied", "qwen3-moe", "gemma4-layer-inputs")
QUICK_FORMS = ("bfloat16", "int8", "int4")
PROMPTS = mixed_prompts()
Alone = Callable[[tuple[str, ...], str, dict], dict]


def digests(launcher: str, ranks: int, kinds, options: dict, directory, forms=tuple(FORMS)) -> dict:
    """Rows and tokens of every checkpoint in every form, by "checkpoint/form"."""
    job = {
        "prompts": PROMPTS,
        "checkpoints": {kind: str(golden(kind).directory) for kind in kinds},
        "options": {"reproducible": True, "block_size": 4} | options,
        "runs": {f"{kind}/{form}": (kind, FORMS[form]) for kind in kinds for form in forms},
    }
    directory.mkdir(exist_ok=True)
    (directory / "job.json").write_text(json.dumps(job))
    out = directory / "out.json"
    done = finish(start(command(launcher, ranks, DRIVER, str(directory / "job.json"), str(out))), 1200)
    assert done.returncode == 0, done.text
    return json.loads(out.read_text())


def differing(results: dict, expected: dict) -> dict[str, int]:
    """Number of rows or token lists that differ, by run."""
    wrong = {}
    for name, result in results.items():
        if "refused" in result:
            continue
        alone = expected[name]
        assert result["rows"].keys() == alone["rows"].keys()
        count = sum(result["rows"][key] != row for key, row in alone["rows"].items())
        if count or result["tokens"] != alone["tokens"]:
            wrong[name] = count
    return wrong


def cut_of(options: dict) -> dict:
    """The option on which bits depend, so that one rank has it, too."""
    return {EXPERTS: options[EXPERTS][:1]} if EXPERTS in options else {}


def kinds_of(name: str) -> tuple[str, ...]:
    """Checkpoints to compare on a layout: only those with experts if it shards these otherwise."""
    kinds = (*KINDS, *FAMILIES)
    if EXPERTS not in LAYOUTS[name][1]:
        return kinds
    return tuple(kind for kind in kinds if '_experts"' in (golden(kind).directory / "config.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Alone:
    """Results of one rank by "checkpoint/form", of which each is computed once."""
    known: dict[str, dict[str, dict]] = {}

    def find(kinds: tuple[str, ...], form: str, options: dict) -> dict:
        results = known.setdefault(json.dumps(options), {})
        if missing := [kind for kind in kinds if f"{kind}/{form}" not in results]:
            results |= digests("single", 1, missing, options, tmp_path_factory.mktemp("alone"), (form,))
        return results

    return find


def compare(alone: Alone, launcher: str, name: str, kinds, forms, directory) -> tuple[int, dict[str, str]]:
    """Number of rows of logits that a layout has in common with one rank, and the runs that it refuses; no row may differ."""
    ranks, options = LAYOUTS[name]
    expected = {}
    for form in forms:
        expected |= alone(kinds, form, cut_of(options))
    results = digests(launcher, ranks, kinds, options, directory, forms)
    assert not differing(results, expected)
    refused = {run: result["refused"] for run, result in results.items() if "refused" in result}
    return sum(len(result["rows"]) for result in results.values() if "rows" in result), refused


def test_sample_of_layouts(alone, tmp_path):
    compared, refused = compare(alone, "torchrun", "tp 2", SAMPLE, FORMS, tmp_path)
    assert compared > 1000 and not refused


@pytest.mark.parametrize(
    ("launcher", "name"), [("mpirun", "tp 2,1"), ("torchrun", "tp 4"), ("mpirun", "tp 2,1, whole experts")]
)
def test_sample_of_families(alone, tmp_path, launcher, name):
    kinds = [kind for kind in QUICK if kind in kinds_of(name)]
    compared, refused = compare(alone, launcher, name, kinds, QUICK_FORMS, tmp_path)
    assert compared > 50 * len(kinds) and not refused


def test_control_without_the_option_differs(alone, tmp_path):
    results = digests("mpirun", 2, SAMPLE[:1], {TP: 2, "reproducible": False}, tmp_path, ("bfloat16",))
    assert differing(results, alone(SAMPLE[:1], "bfloat16", {}))


def test_control_with_experts_cut_otherwise_differs(alone):
    whole, columns = (alone(("qwen3-moe",), "bfloat16", options) for options in ({EXPERTS: ["whole"]}, {}))
    assert differing({"qwen3-moe/bfloat16": whole["qwen3-moe/bfloat16"]}, columns)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_family_on_every_layout(alone, name, launcher, form, tmp_path):
    kinds = kinds_of(name)[launcher == "mpirun" :: 2]
    compared, refused = compare(alone, launcher, name, kinds, (form,), tmp_path)
    print(f"{name}, {launcher}, {form}: {len(kinds)} checkpoints, {compared} rows equal, refused: {refused or 'none'}")
    assert compared > 50 * (len(kinds) - len(refused))
