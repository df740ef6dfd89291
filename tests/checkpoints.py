"""Tiny random checkpoints made by Transformers, and what Transformers itself makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

VOCAB = 512
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "你好,世界。今天天气很好",
    "pipeline parallel inference on two nodes",
    "0123456789 +-*/=",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 14 * 8,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
LLAMA_SHAPE = QWEN_SHAPE | {
    "hidden_size": 12 * 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "intermediate_size": 170,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_checkpoint(directory: Path, kind: str) -> Path:
    """Write one of the named checkpoints into ``directory``; seeded, so that every process makes the same."""
    torch.manual_seed(sum(map(ord, kind)))
    if kind == "qwen2-tied":
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN_SHAPE, tie_word_embeddings=True))
    elif kind == "qwen2-untied-sharded":
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN_SHAPE, tie_word_embeddings=False))
    elif kind == "qwen2-windows":
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN_SHAPE, **QWEN_WINDOWS, tie_word_embeddings=True))
    elif kind == "llama-untied":
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_SHAPE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE))
    elif kind == "llama-tied-biased":
        model = LlamaForCausalLM(
            LlamaConfig(**LLAMA_SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
        )
    else:
        raise ValueError(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # Transformers starts biases at zero, where a forgotten one would not show
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(directory, max_shard_size="100KB" if "sharded" in kind else "5GB")
    write_tokenizer(directory)
    return directory


KINDS = ("qwen2-tied", "qwen2-untied-sharded", "llama-untied", "llama-tied-biased")


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer with a Qwen2-style chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def mixed_prompts(count: int = 8, seed: int = 7) -> list[list[int]]:
    """Prompts of random ids, 1 to about 90 tokens long."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 90, 17, 33, 5, 64, 16, 48][:count]
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def transformers_greedy(directory: Path, prompts: list[list[int]], num_tokens: int) -> list[dict]:
    """Transformers' own greedy continuation of each prompt, ignoring end-of-sequence, with the logits of each token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack([step[0] for step in out.logits])
        results.append({"token_ids": out.sequences[0, len(prompt) :].tolist(), "logits": logits})
    return results


@torch.no_grad()
def transformers_states(directory: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Transformers' own hidden states of each prompt's tokens after the final norm: (T, D)."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


def worst_vector_error(vectors: list[list[float]], states: list[torch.Tensor], pooling: str) -> float:
    """Largest |difference| to the pooled states, relative to their largest number, over all vectors."""
    worst = 0.0
    for vector, states_TD in zip(vectors, states, strict=True):
        wanted_D = states_TD.mean(dim=0) if pooling == "mean" else states_TD[-1]
        worst = max(worst, float((torch.tensor(vector) - wanted_D).abs().max() / wanted_D.abs().max()))
    return worst
