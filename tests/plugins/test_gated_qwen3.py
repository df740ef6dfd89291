"""examples/plugins/gated_qwen3.py and int8_rows.py: a family and a format of which Transformers knows nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import mixed_prompts, write_tokenizer
from launchers import LAUNCH, ROOT, run
from safetensors.torch import save_file

FAMILY, FORMAT = (str(ROOT / f"examples/plugins/{name}.py") for name in ("gated_qwen3", "int8_rows"))
HEADS, KV_HEADS, HEAD_SIZE, LAYERS, EPS, THETA = 6, 2, 16, 4, 1e-6, 1e4
SHAPE = {
    "architectures": ["GatedQwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "rope_theta": THETA,
    "rms_norm_eps": EPS,
    "eos_token_id": 1,
}
PROMPTS, NUM_TOKENS, TOLERANCE = mixed_prompts(4), 16, 1e-4
LEFT_OUT = ["model.embed_tokens", "model.layers.2.self_attn.gate_proj"]
LAYOUTS = {"one rank": ("single", 1), "tp 2": ("torchrun", 2, "-tp", "2"), "pp 2": ("torchrun", 2, "-pp", "2")}
Tensors = dict[str, torch.Tensor]


def layouts(quick: str):
    return [pytest.param(name, marks=[] if name == quick else pytest.mark.slow, id=name) for name in LAYOUTS]


def random_tensors() -> Tensors:
    size, columns, vocab = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    q, kv = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes = {"model.embed_tokens": (vocab, size), "lm_head": (vocab, size), "model.norm": (size,)}
    for layer in range(LAYERS):
        attention = {"q_proj": (q, size), "k_proj": (kv, size), "v_proj": (kv, size), "o_proj": (size, q)}
        attention |= {"gate_proj": (HEADS, size), "q_norm": (HEAD_SIZE,), "k_norm": (HEAD_SIZE,)}
        mlp = {"gate_proj": (columns, size), "up_proj": (columns, size), "down_proj": (size, columns)}
        shapes |= {f"model.layers.{layer}.self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"model.layers.{layer}.mlp.{name}": shape for name, shape in mlp.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}"] = (size,)
    generator = torch.Generator().manual_seed(1)
    return {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write(directory: Path, tensors: Tensors, **config) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SHAPE | config))
    save_file(tensors, directory / "model.safetensors")
    write_tokenizer(directory)
    return directory


def round_to_int8(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Tensors of a checkpoint in the plugin's format, and the floats that they stand for."""
    stored, floats = {}, {}
    for name, tensor in tensors.items():
        matrix = name.removesuffix(".weight")
        if tensor.ndim == 1 or matrix in LEFT_OUT:
            stored[name] = floats[name] = tensor
            continue
        scale = tensor.abs().amax(dim=1) / 127
        rows = (tensor / scale[:, None]).round().to(torch.int8)
        stored |= {f"{matrix}.int8": rows, f"{matrix}.scale": scale}
        floats[name] = rows * scale[:, None]
    return stored, floats


def logits_of(tensors: Tensors, ids: list[int], *, gated: bool = True) -> torch.Tensor:
    """The model in plain PyTorch, in float64: logits of each token, (T, V)."""
    tensors = {name.removesuffix(".weight"): tensor.double() for name, tensor in tensors.items()}
    T = len(ids)

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * tensors[name]

    def rotate(x_THP):
        frequency_R = THETA ** (-torch.arange(0, HEAD_SIZE, 2).double() / HEAD_SIZE)
        angle_T1P = (torch.arange(T).double()[:, None] * frequency_R).repeat(1, 2)[:, None]
        low, high = x_THP.chunk(2, dim=-1)
        return x_THP * angle_T1P.cos() + torch.cat((-high, low), dim=-1) * angle_T1P.sin()

    hidden = tensors["model.embed_tokens"][ids]
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        x = norm(hidden, f"{path}.input_layernorm")
        q, k, v, gate = (x @ tensors[f"{path}.self_attn.{name}_proj"].T for name in ("q", "k", "v", "gate"))
        q, k, v = (y.view(T, -1, HEAD_SIZE) for y in (q, k, v))
        q, k = (rotate(norm(y, f"{path}.self_attn.{name}_norm")) for y, name in ((q, "q"), (k, "k")))
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, v))
        scores = torch.einsum("thp,shp->hts", q, k) / HEAD_SIZE**0.5
        scores.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        heads = torch.einsum("hts,shp->thp", scores.softmax(-1), v)
        heads = heads * gate.sigmoid()[:, :, None] if gated else heads
        hidden = hidden + heads.flatten(1) @ tensors[f"{path}.self_attn.o_proj"].T
        x = norm(hidden, f"{path}.post_attention_layernorm")
        gate, up = (x @ tensors[f"{path}.mlp.{name}_proj"].T for name in ("gate", "up"))
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ tensors[f"{path}.mlp.down_proj"].T
    return norm(hidden, "model.norm") @ tensors["lm_head"].T


def greedy(tensors: Tensors, prompt: list[int], **options) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(int(logits_of(tensors, ids, **options)[-1].argmax()))
    return ids[len(prompt) :]


def answers(layout: str, directory: Path, *plugins: str) -> list[dict]:
    """Output lines of a job over ``PROMPTS`` with the 20 largest log-probabilities of each token."""
    given, written = directory / "in.jsonl", directory / "out.jsonl"
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 20}
    given.write_text("".join(json.dumps({"prompt_token_ids": ids} | fields) + "\n" for ids in PROMPTS))
    named = [flag for plugin in plugins for flag in ("--plugin", plugin)]
    launcher, ranks, *flags = LAYOUTS[layout]
    done = run(launcher, ranks, LAUNCH, "--model", directory, *flags, *named, "--input", given, "--output", written)
    assert done.returncode == 0, done.text
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["id"])


@pytest.mark.parametrize("layout", layouts(quick="pp 2"))
def test_tokens_and_logits_are_those_of_plain_pytorch(layout, tmp_path):
    tensors = random_tensors()
    for prompt, line in zip(PROMPTS, answers(layout, write(tmp_path / "model", tensors), FAMILY), strict=True):
        assert line["token_ids"] == greedy(tensors, prompt) != greedy(tensors, prompt, gated=False)
        logits_TV = logits_of(tensors, prompt + line["token_ids"])[len(prompt) - 1 : -1]
        logprobs_TV = logits_TV.log_softmax(-1)
        for logits_V, logprobs_V, token in zip(logits_TV, logprobs_TV, line["logprobs"], strict=True):
            ids, found = [*map(int, token["top"])], torch.tensor([*token["top"].values()], dtype=torch.float64)
            assert len(ids) == 20 and (found - logprobs_V[ids]).abs().max() < TOLERANCE * logits_V.abs().max()


@pytest.mark.parametrize("layout", layouts(quick="one rank"))
def test_rows_of_int8_give_the_numbers_of_their_floats(layout, tmp_path):
    stored, floats = round_to_int8(random_tensors())
    quantization = {"quant_method": "int8_rows", "modules_to_not_convert": LEFT_OUT}
    rows = write(tmp_path / "rows", stored, quantization_config=quantization)
    plain = answers(layout, write(tmp_path / "plain", floats), FAMILY)
    found = answers(layout, rows, FAMILY, FORMAT)
    for line, expected in zip(found, plain, strict=True):
        assert (line["token_ids"], line["logprobs"]) == (expected["token_ids"], expected["logprobs"])


def test_family_is_not_known_without_its_plugin(tmp_path):
    done = run("single", 1, LAUNCH, "--model", write(tmp_path / "model", random_tensors()), "--prompt", "x")
    (line,) = done.our_errors
    assert done.returncode == 2, done.text
    assert "architecture 'GatedQwen3ForCausalLM' is not supported; " in line
    assert "Qwen3ForCausalLM" in line.split("supported are")[0] and "; supported are LlamaForCausalLM, " in line


def test_family_is_refused_where_its_bits_may_depend_on_the_batch(tmp_path):
    directory = write(tmp_path / "model", random_tensors())
    flags = ("--plugin", FAMILY, "--model", directory, "--reproducible", "--prompt", "hello")
    done = run("single", 1, LAUNCH, *flags)
    assert done.returncode == 2 and done.stderr.endswith(
        "error: --reproducible: the bits of GatedQwen3ForCausalLM, a model family from gated_qwen3, may depend on the batch; "
        "give a checkpoint of a shipped family\n"
    ), done.text
