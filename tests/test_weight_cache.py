"""Packed weights from the cache through ``LLM``: the tokens of those that were just packed, for families, quantisations and codes."""

from __future__ import annotations

import math
import os
import threading

import pytest
import torch
from checkpoints import write_tokenizer
from golden import PROMPTS, golden, greedy
from published_formats import PUBLISHED, write_published
from test_quantised_checkpoints import SHAPE
from transformers import AutoModelForCausalLM, Qwen2Config

from labinfer import LLM
from labinfer.functions import autotune
from labinfer.weights import packed_file
from labinfer.weights.weight_cache import WeightCache

SOME = PROMPTS[1:4]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, which also keeps small weights."""
    monkeypatch.setattr(packed_file, "LEAST_BYTES", 0)
    cache = WeightCache(tmp_path / "cache", 1 << 30, free_bytes=0)
    monkeypatch.setattr(WeightCache, "from_home", lambda gib: cache if gib else None)
    return cache


def run(directory, **options) -> tuple[list[list[int]], int]:
    """Tokens of some prompts, and the bytes that were read of the checkpoint. Ends when all that is kept is written.

    Without tuning: what was measured on a busy machine is measured again by the next start, which may hold weights in another form.
    """
    with LLM(str(directory), num_kv_blocks=64, **{"autotune": "off"} | options) as llm:
        outputs = greedy(llm, SOME)
        (worker,) = llm.report.workers
    for thread in threading.enumerate():
        if thread.name == "weight-cache":
            thread.join()
    return [output.token_ids for output in outputs], worker.weight_bytes_read


def check_second_start(cache: WeightCache, directory, **options) -> None:
    expected, _ = run(directory, weight_cache_size=0, **options)
    assert not cache.files()
    first, second = run(directory, **options), run(directory, **options)
    assert len(cache.files()) == 1 and not list(cache.folder.glob("*.unfinished"))
    assert first[0] == second[0] == expected
    assert first[1] > 0 and second[1] == 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2-tied", {}),
        ("llama-untied", {"dtype": "bfloat16"}),
        ("llama-tied-biased", {"quantization": "int8"}),
        ("qwen3", {"dtype": "bfloat16", "quantization": "int4"}),
        ("qwen3.5-moe", {"dtype": "bfloat16"}),
        ("qwen3-moe", {"quantization": "int4", "dtype": "bfloat16"}),
        ("glm4-moe", {"quantization": "int8"}),
        ("olmo3", {"functions": ("reference",), "quantization": "int4"}),
    ],
)
def test_second_start_maps_what_the_first_packed(cache, kind, options):
    check_second_start(cache, golden(kind).directory, **options)


def test_weights_in_the_form_that_was_measured_are_mapped_again(cache, monkeypatch):
    monkeypatch.setattr(autotune, "MAX_SPREAD", math.inf)  # whether or not this machine is idle
    check_second_start(cache, golden("qwen2-tied").directory, dtype="bfloat16", autotune="on")


@pytest.mark.parametrize("name", ["gptq-asym", "awq", "fp8"])
def test_codes_of_checkpoints_are_kept(cache, tmp_path, name):
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE)).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    write_published(tmp_path / "model", tmp_path / "twin", PUBLISHED[name])
    check_second_start(cache, tmp_path / "model", **({"quantization": "int8"} if name == "fp8" else {}))


def test_experts_in_a_file_are_left_out(cache):
    directory = golden("qwen3-moe").directory
    expected, _ = run(directory, weight_cache_size=0)
    (first, all_bytes), (second, expert_bytes) = (run(directory, expert_offload=0.001) for _ in range(2))
    assert first == second == expected
    assert 0 < expert_bytes < all_bytes


def test_forms_and_layouts_have_files_of_their_own(cache):
    directory = golden("qwen2-tied").directory
    for options in ({}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}):
        for _ in range(2):
            run(directory, **options)
    run(directory, quantization="int4", quantization_group_size=32)
    assert len(cache.files()) == 5


def test_experts_without_one_memory_are_read_again(cache):
    """Those of plain torch are matrix by matrix; everything else is kept."""
    directory = golden("qwen3-moe").directory
    (first, all_bytes), (second, expert_bytes) = (run(directory, functions=("reference",)) for _ in range(2))
    assert first == second and 0 < expert_bytes < all_bytes


@pytest.mark.parametrize("place", [0, 100_000, -100, -10])
def test_damaged_file_is_noticed_and_made_anew(cache, place, caplog):
    directory = golden("qwen2-tied").directory
    expected, _ = run(directory)
    (file,) = cache.files()
    data = bytearray(file.path.read_bytes())
    data[place] ^= 1
    file.path.write_bytes(data)
    tokens, bytes_read = run(directory)
    assert tokens == expected and bytes_read > 0
    assert "damaged" in caplog.text
    assert run(directory) == (expected, 0)


def test_truncated_file_is_noticed(cache):
    directory = golden("qwen2-tied").directory
    expected, _ = run(directory)
    (file,) = cache.files()
    for size in (file.size - 1, file.size // 2, 10, 0):
        os.truncate(file.path, size)
        tokens, bytes_read = run(directory)
        assert tokens == expected and bytes_read > 0
        assert run(directory) == (expected, 0)
