"""A GGUF file under real launchers: the text of the checkpoint that it was made of, from ranks that read their slices."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import FULL, HYBRID, LINEAR, MOE, QWEN_SHAPE, make_checkpoint, randomize, write_tokenizer
from gguf_files import file_config, write_gguf
from launchers import Finished
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3_5MoeTextConfig

FLAGS = (
    "--prompt",
    "I'LL  be 12345 x",
    "--raw",
    "--max-tokens",
    "12",
    "--ignore-eos",
    "--dtype",
    "float32",
    "--threads",
    "1",
)
DECODED = ("-q", "none")
"""Flags with which ranks decode the codes of a file."""
RUNS = {
    "llama-untied": (("single", 1, ()), ("torchrun", 2, ("-tp", "2")), ("mpirun", 2, ("-pp", "2"))),
    "qwen3.5-moe": (("torchrun", 3, ("-tp", "3")),),
    "gemma3": (("torchrun", 2, ("-tp", "2")),),
    "gpt-oss": (("mpirun", 3, ("-tp", "3")),),
    "deepseek-v2": (("torchrun", 3, ("-tp", "3")),),
    "deepseek-v3": (("mpirun", 2, ("-pp", "2")), ("torchrun", 3, ("-tp", "1,2", "-pp", "2"))),
    "codes": (("torchrun", 2, (*DECODED, "-tp", "2")),),
}
"""Launcher, ranks and flags of all runs of a file."""


def config_of(name: str) -> PretrainedConfig:
    """Experts and a delta rule of which three ranks divide no heads or columns; blocks of 256 of which each of two ranks has
    a part; or another kind, whose tensors files join and stack."""
    if name == "qwen3.5-moe":
        shape = HYBRID | {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]} | MOE
        return Qwen3_5MoeTextConfig(**shape, num_experts=7, shared_expert_intermediate_size=50)
    if name == "codes":
        sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_hidden_layers": 2}
        return Qwen2Config(**QWEN_SHAPE | sizes)
    return file_config(name)


def make_model(name: str, directory: Path) -> tuple[Path, Path]:
    """A checkpoint, and a file of it."""
    checkpoint, path = directory / "model", directory / "model.gguf"
    if name == "llama-untied":
        path = write_gguf(make_checkpoint(checkpoint, name), path, split_max_tensors=20)
        assert path.name == "model-00001-of-00002.gguf"
        return checkpoint, path
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config_of(name))
    if name != "codes":
        randomize(model)
    model.save_pretrained(checkpoint)
    write_tokenizer(checkpoint)
    types = {"v_proj": "Q6_K", "down_proj": "Q6_K", "_proj": "Q8_0"} if name == "codes" else "F32"
    return checkpoint, write_gguf(checkpoint, path, types, merged=name == "deepseek-v2")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """A checkpoint and a file of it, by name."""
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in RUNS}


@pytest.fixture(scope="module")
def expected(models, launches):
    """``expected(name)``: how one rank ends with a checkpoint; with codes, that is a file that it decodes."""

    @cache
    def run_alone(name: str) -> Finished:
        checkpoint, path = models[name]
        model, flags = (path, DECODED) if name == "codes" else (checkpoint, ())
        return launches.run("single", 1, "--model", model, *FLAGS, *flags)

    return run_alone


@pytest.mark.parametrize(
    ("name", "launcher", "ranks", "flags"),
    [(name, *run) for name, runs in RUNS.items() for run in runs],
)
def test_every_layout_gives_the_text_of_the_checkpoint(models, expected, launches, name, launcher, ranks, flags):
    done = launches.run(launcher, ranks, "--model", models[name][1], *FLAGS, *flags)
    assert expected(name).returncode == done.returncode == 0, expected(name).text + done.text
    assert done.stdout == expected(name).stdout and done.stdout.strip(), done.text


def test_two_ranks_compute_with_the_codes_of_a_file(models, launches):
    done = launches.run("torchrun", 2, "--model", models["codes"][1], *FLAGS, "-tp", "2")
    assert done.returncode == 0 and done.stdout.strip(), done.text


def test_tokenizer_that_is_not_known_leaves_a_way_out(launches, tmp_path):
    directory = make_checkpoint(tmp_path / "model", "qwen2-tied")
    path = write_gguf(directory, tmp_path / "model.gguf", pre="of-my-own")
    cases = [["--model", path], ["--model", path, "--tokenizer", directory], ["--model", directory]]
    refused, done, expected = (launches.run("single", 1, *flags, *FLAGS) for flags in cases)
    assert refused.returncode == 2 and len(refused.our_errors) == 1
    assert "pre-tokenizer 'of-my-own'" in refused.our_errors[0] and "--tokenizer DIR" in refused.our_errors[0]
    assert done.stdout == expected.stdout and expected.stdout.strip(), done.text
