"""A GGUF file under real launchers: the text of the checkpoint that it was made of, from ranks that read their slices."""

from __future__ import annotations

import pytest
import torch
from checkpoints import FULL, HYBRID, LINEAR, MOE, QWEN_SHAPE, make_checkpoint, randomize, write_tokenizer
from gguf_files import file_config, write_gguf
from launchers import LAUNCH, run
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3_5MoeTextConfig

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


def test_every_layout_gives_the_text_of_the_checkpoint(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "llama-untied")
    path = write_gguf(directory, tmp_path / "model.gguf", split_max_tensors=20)
    assert path.name == "model-00001-of-00002.gguf"
    expected = run("single", 1, LAUNCH, "--model", str(directory), *FLAGS)
    assert expected.returncode == 0 and expected.stdout.strip(), expected.text
    for launcher, ranks, layout in (("single", 1, ()), ("torchrun", 2, ("-tp", "2")), ("mpirun", 2, ("-pp", "2"))):
        found = run(launcher, ranks, LAUNCH, "--model", str(path), *FLAGS, *layout)
        assert found.stdout == expected.stdout, found.text


def test_experts_and_delta_rule_are_cut_over_three_ranks(tmp_path):
    """Heads and columns that three ranks do not divide, from tensors of all experts and rows in an order of their own."""
    torch.manual_seed(4)
    types = {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
    config = Qwen3_5MoeTextConfig(**HYBRID | types, **MOE, num_experts=7, shared_expert_intermediate_size=50)
    model = AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    expected = run("single", 1, LAUNCH, "--model", str(tmp_path / "model"), *FLAGS)
    found = run("torchrun", 3, LAUNCH, "--model", str(path), *FLAGS, "-tp", "3")
    assert found.stdout == expected.stdout and expected.stdout.strip(), found.text


SAMPLE = (
    ("gemma3", "torchrun", 2, ("-tp", "2")),
    ("gpt-oss", "mpirun", 3, ("-tp", "3")),
    ("deepseek-v2", "torchrun", 3, ("-tp", "3")),
    ("deepseek-v3", "mpirun", 2, ("-pp", "2")),
    ("deepseek-v3", "torchrun", 3, ("-tp", "1,2", "-pp", "2")),
)


@pytest.mark.parametrize(("kind", "launcher", "ranks", "layout"), SAMPLE)
def test_ranks_read_their_parts_of_joined_and_stacked_tensors(tmp_path, kind, launcher, ranks, layout):
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(file_config(kind))
    randomize(model)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", merged=kind == "deepseek-v2")
    expected = run("single", 1, LAUNCH, "--model", str(tmp_path / "model"), *FLAGS)
    found = run(launcher, ranks, LAUNCH, "--model", str(path), *FLAGS, *layout)
    assert found.stdout == expected.stdout and expected.stdout.strip(), found.text


def test_codes_are_cut_over_two_ranks(tmp_path):
    """Blocks of 256 of which each rank has a part."""
    torch.manual_seed(4)
    shape = QWEN_SHAPE | {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    AutoModelForCausalLM.from_config(Qwen2Config(**shape)).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    path = write_gguf(
        tmp_path / "model", tmp_path / "model.gguf", {"v_proj": "Q6_K", "down_proj": "Q6_K", "_proj": "Q8_0"}
    )
    expected = run("single", 1, LAUNCH, "--model", str(path), *FLAGS, "-q", "none")
    decoded = run("torchrun", 2, LAUNCH, "--model", str(path), *FLAGS, "-q", "none", "-tp", "2")
    assert decoded.stdout == expected.stdout and expected.stdout.strip(), decoded.text
    held = run("torchrun", 2, LAUNCH, "--model", str(path), *FLAGS, "-tp", "2")
    assert held.returncode == 0 and held.stdout.strip(), held.text


def test_tokenizer_that_is_not_known_leaves_a_way_out(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "qwen2-tied")
    path = write_gguf(directory, tmp_path / "model.gguf", pre="of-my-own")
    refused = run("single", 1, LAUNCH, "--model", str(path), *FLAGS)
    assert refused.returncode == 2 and len(refused.our_errors) == 1
    assert "pre-tokenizer 'of-my-own'" in refused.our_errors[0] and "--tokenizer DIR" in refused.our_errors[0]
    done = run("single", 1, LAUNCH, "--model", str(path), *FLAGS, "--tokenizer", str(directory))
    expected = run("single", 1, LAUNCH, "--model", str(directory), *FLAGS)
    assert done.stdout == expected.stdout and expected.stdout.strip(), done.text
