"""With ``--reproducible`` every family's logits and drawn tokens have the same bits on one rank, on pipelines and on all tensor-parallel degrees."""

from __future__ import annotations

import json

import pytest
from checkpoints import FAMILIES, KINDS, mixed_prompts
from golden import golden
from launchers import command, finish, start

DRIVER = "tests/cluster/bits_driver.py"
PP, TP = "pipeline_parallel_size", "tensor_parallel_size"
LAYOUTS = {
    "tp 2": (2, {TP: 2}),
    "pp 2": (2, {PP: 2}),
    "tp 3": (3, {TP: 3}),
    "tp 2,1": (3, {TP: [2, 1], PP: 2}),
    "tp 4": (4, {TP: 4}),
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
PROMPTS = mixed_prompts()


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


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    return digests("single", 1, SAMPLE, {}, tmp_path_factory.mktemp("alone"))


def test_sample_of_layouts(alone, tmp_path):
    results = digests("torchrun", 2, SAMPLE, {TP: 2}, tmp_path)
    assert not [name for name, result in results.items() if "refused" in result]
    assert not differing(results, alone)


def test_control_without_the_option_differs(alone, tmp_path):
    results = digests("mpirun", 2, SAMPLE[:1], {TP: 2, "reproducible": False}, tmp_path, ("bfloat16",))
    assert differing(results, alone)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_family_on_every_layout(name, launcher, tmp_path):
    kinds = (*KINDS, *FAMILIES)[launcher == "mpirun" :: 2]
    ranks, options = LAYOUTS[name]
    expected = digests("single", 1, kinds, {}, tmp_path / "alone")
    results = digests(launcher, ranks, kinds, options, tmp_path / "layout")
    assert not differing(results, expected)
    assert sum(len(result["rows"]) for result in results.values() if "rows" in result) > 1000
