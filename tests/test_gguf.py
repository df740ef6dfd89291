"""A GGUF file through ``LLM``: the text and the numbers of the checkpoint that it was made of."""

from __future__ import annotations

import statistics
from functools import partial

import pytest
import torch
from checkpoints import (
    FAMILY_SHAPE,
    FULL,
    HYBRID,
    LINEAR,
    LLAMA3_ROPE,
    LLAMA_SHAPE,
    MOE,
    QWEN_SHAPE,
    TIED,
    YARN,
    mixed_prompts,
    randomize,
    transformers_logprobs,
    write_tokenizer,
)
from gguf_files import FILE_KINDS, file_config, write_gguf, write_twin
from layouts import GREEDY
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError

DELTA = HYBRID | {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
CONFIGS = {
    "llama": lambda: LlamaConfig(**LLAMA_SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama-biased": lambda: LlamaConfig(**LLAMA_SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**QWEN_SHAPE, tie_word_embeddings=True, rope_parameters=YARN),
    "qwen3": lambda: Qwen3Config(**FAMILY_SHAPE, tie_word_embeddings=False),
    "qwen2-moe": lambda: Qwen2MoeConfig(**FAMILY_SHAPE, **MOE, num_experts=7, shared_expert_intermediate_size=50),
    "qwen3-moe": lambda: Qwen3MoeConfig(**FAMILY_SHAPE, **MOE, num_experts=11, norm_topk_prob=True),
    "qwen3.5": lambda: Qwen3_5TextConfig(**DELTA, tie_word_embeddings=True),
    **{kind: partial(file_config, kind) for kind in FILE_KINDS},
    "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(**DELTA, **MOE, num_experts=7, shared_expert_intermediate_size=50),
}
FUSED = ("qwen3-moe", "gpt-oss")
"""Kinds of which gates and ups of experts are written as one tensor."""
PROMPTS = mixed_prompts(4)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=0)
TRICKY = ["I'LL  be\n\n12345 don't", "e\u0301 你好 🤦🏽‍♂️", "<|im_start|>user\nhi<|im_end|>\n", " "]


@pytest.fixture(scope="module", params=CONFIGS)
def models(request, tmp_path_factory):
    """A checkpoint, and a file made of it."""
    directory = tmp_path_factory.mktemp("gguf") / request.param
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    randomize(model)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    path = directory.parent / f"{request.param}.gguf"
    kinds = {"merged": request.param == "deepseek-v2", "fused": request.param in FUSED}
    return directory, write_gguf(directory, path, **kinds)


def answers(model, **options):
    with LLM(str(model), dtype="float32", num_kv_blocks=100, threads=1, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        texts = llm.generate(TRICKY, GREEDY)
    logprobs = [one.logprob for output in outputs for one in output.prompt_logprobs]
    return (
        [output.completions[0].token_ids for output in outputs],
        logprobs,
        [(output.prompt_token_ids, output.completions[0].text) for output in texts],
    )


def test_file_gives_the_tokens_and_texts_of_its_checkpoint(models):
    directory, path = models
    expected, found = answers(directory), answers(path)
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-4)
    assert found[2] == expected[2]


WIDE = QWEN_SHAPE | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
"""Rows have whole blocks of every type."""
MIXED = {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K", "_proj": "Q4_K"}
"""As in the files called Q4_K_M."""
TYPES = {
    "Q4_0": "Q4_0",
    "Q8_0": "Q8_0",
    "mixed": MIXED,
    "rest": {
        "q_proj": "Q5_0",
        "k_proj": "IQ4_NL",
        "v_proj": "IQ4_XS",
        "o_proj": "MXFP4",
        "gate_proj": "Q4_1",
        "up": "Q4_K",
        "down": "Q4_1",
    },
    "low": {
        "q_proj": "TQ2_0",
        "k_proj": "TQ1_0",
        "v_proj": "Q3_K",
        "o_proj": "IQ1_S",
        "gate_proj": "Q2_K",
        "up": "IQ3_S",
        "down": "IQ2_XXS",
    },
    "low-16": {"q_proj": "IQ2_XS", "k_proj": "IQ2_S", "gate_proj": "Q3_K", "up": "Q2_K", "_proj": "IQ3_XXS"},
    "five": {"gate_proj": "Q5_1", "up": "Q5_K", "down": "Q5_1"},
    "MXFP4": "MXFP4",
}
"""Experts stay in codes where all three of their matrices have one form."""


def logprobs(model, **options) -> tuple[list[float], int]:
    """Logprobs of the prompts' tokens, and the bytes of the weights."""
    with LLM(str(model), num_kv_blocks=100, threads=1, **{"dtype": "float32"} | options) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True))
        num_bytes = llm.layout.meta(llm.layout.topology.place(0)).weight_bytes
    return [one.logprob for output in outputs for one in output.prompt_logprobs], num_bytes


def relative_error(found: list[float], exact: list[float]) -> float:
    """Mean error, as a part of the exact values' spread."""
    return statistics.fmean(abs(a - b) for a, b in zip(found, exact, strict=True)) / statistics.stdev(exact)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", ["dense", "experts"])
def test_quantised_file_has_its_values_and_is_held_in_codes(tmp_path, family, kind):
    torch.manual_seed(4)
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    config = Qwen2Config(**WIDE, **TIED) if family == "dense" else Qwen3MoeConfig(**WIDE, **experts, head_dim=64)
    model = AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", TYPES[kind])
    twin = write_twin(tmp_path / "model", path, tmp_path / "twin")
    exact = transformers_logprobs(twin, PROMPTS)
    decoded, all_bytes = logprobs(path, quantization="none")
    assert decoded == pytest.approx(exact, rel=1e-4, abs=1e-4)
    _, num_bytes = logprobs(path)
    assert num_bytes < all_bytes
    held, rounded = (logprobs(model, quantization="int8")[0] for model in (path, twin))
    assert relative_error(held, exact) < 1.1 * relative_error(rounded, exact)  # what rounding inputs to 8 bits does
    in_16_bits, _ = logprobs(path, dtype="auto")  # whose functions are tuned
    assert relative_error(in_16_bits, exact) < 0.1


def test_chat_and_structured_outputs_work(tmp_path):
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(CONFIGS["qwen2"]()).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", "F16")
    answers = []
    for model in (tmp_path / "model", path):
        with LLM(str(model), dtype="float32", num_kv_blocks=100, threads=1, quantization="int8") as llm:
            params = SamplingParams(max_tokens=8, structured_outputs={"choice": ["red", "green"]})
            answers.append(llm.chat([{"role": "user", "content": "hi"}], params))
    assert answers[1][0].prompt_token_ids == answers[0][0].prompt_token_ids
    assert answers[1][0].completions[0].text in ("red", "green")


def test_what_is_no_model_is_refused_in_one_line(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"no")
    with pytest.raises(UserError, match=r"a\.gguf is not a readable GGUF file: it ends too early"):
        LLM(str(tmp_path / "a.gguf"))
    (tmp_path / "a.bin").write_bytes(b"no")
    with pytest.raises(UserError, match=r"is a file; give the directory .* or a \.gguf file"):
        LLM(str(tmp_path / "a.bin"))
