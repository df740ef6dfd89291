"""Make a checkpoint with random weights: to measure the engine at a given size.

    python tools/random_checkpoint.py --shape tiny DIR
    python tools/random_checkpoint.py --shape qwen2-0.5b --faint-from 2 MODEL
    python tools/random_checkpoint.py --shape qwen2-0.5b --layers 2 DRAFT

Seeded, so that the same command gives the same checkpoint everywhere. It has a tokenizer and a chat template; what it
says makes no sense. The last two are a model whose layers from the third on say little, and its first two layers alone, which so
draft well for it: random models else agree by chance only. Tensors are made and written one by one, so a checkpoint may be larger than the memory.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from labinfer.comm.local import LocalCommunicator
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.launch.providers import reference_registry
from labinfer.models.layers.context import StageContext
from labinfer.models.registry import load_config, model_class
from labinfer.weights.loader import weight_slices
from labinfer.weights.slices import TensorSlice

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
SHAPES: dict[str, dict[str, object]] = {
    "tiny": QWEN2
    | {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
    # As many layers as qwen2-0.5b, with weights that take next to no time: what is left of a step is its overhead.
    "thin": QWEN2
    | {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
    },
    "small": QWEN2
    | {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
    },
    "qwen2-0.5b": QWEN2
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    # Published models as they are, 3.4, 8.0 and 16.4 GB in bfloat16.
    "qwen3-1.7b": QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    # Llama 3.2 3B as it is: 6.4 GB.
    "llama-3.2-3b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    # The text model of Gemma 3 4B as it is: 7.8 GB.
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    # Qwen3-30B-A3B at its full width, with 4 of 48 layers: 6.2 GB.
    "qwen3-30b-a3b": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    # Qwen3-30B-A3B with half of the hidden size, half of each expert and an eighth of the layers: 1.9 GB in bfloat16.
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "vocab_size": 16384,
        "max_position_embeddings": 32768,
    },
    # Qwen3.5-0.8B as it is: 1.5 GB in bfloat16.
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
    },
    # Qwen3.6-35B-A3B with half of the hidden size, half of the experts and of each, and a fifth of the layers: 1.8 GB.
    "qwen3.5-moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "vocab_size": 16384,
        "max_position_embeddings": 262144,
    },
}
"""Fields of config.json by shape, beside those of ``COMMON``; without a vocabulary it is the tokenizer's. A family that the engine
knows needs nothing but its entry: tensors are those that its model asks for."""
COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True}
STD = 0.1
"""Standard deviation of the weights; large enough that the answers differ."""
FAINT = 0.01
"""Factor of what faint layers add: the model then mostly chooses as its first layers alone would."""
ADDS = re.compile(r"layers\.(\d+)\..*\.(o_proj|down_proj)\.weight$")
SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "Every rank starts the same program, and a map from rank to stage decides which layers it loads.",
    "The scheduler sends micro-batches through the pipeline, one in for each one out.",
    "每个进程运行同一个程序,由进程号决定加载哪些层。调度器把微批次依次送入流水线。",
]


def make_checkpoint(
    directory: Path,
    shape: str,
    dtype: torch.dtype,
    *,
    layers: int = 0,
    vocab_size: int = 0,
    faint_from: int | None = None,
) -> None:
    """Write config, weights (normal; norms 1), tokenizer and chat template.

    Args:
        layers: instead of the shape's own number; 0 for that. They are the first ones of more layers.
        vocab_size: instead of the shape's own number; 0 for that.
        faint_from: layers from this one on add little to what comes out of those before.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {"vocab_size": _write_tokenizer(directory)} | COMMON | SHAPES[shape]
    config |= {"num_hidden_layers": layers} if layers else {}
    config |= {"vocab_size": vocab_size} if vocab_size else {}
    config |= {"eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"), "torch_dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    shapes, generator = tensor_shapes(directory), torch.Generator().manual_seed(0)

    def tensors() -> Iterator[torch.Tensor]:
        for name, size in shapes.items():
            is_norm = len(size) == 1 and "norm" in name
            tensor = torch.ones(size) if is_norm else torch.empty(size).normal_(0.0, STD, generator=generator)
            yield tensor * FAINT if faint_from is not None and is_faint(name, faint_from) else tensor

    with (directory / "model.safetensors").open("wb") as file:
        header = _safetensors_header(shapes, dtype)
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors():
            file.write(memoryview(tensor.to(dtype).view(torch.uint8).numpy()))


def is_faint(name: str, faint_from: int) -> bool:
    """Whether a tensor leads out of one of the layers from this one on."""
    match = ADDS.search(name)
    return match is not None and int(match[1]) >= faint_from


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the tensors that the model of this config.json asks for."""
    config = load_config(directory)
    context = StageContext(
        tp=TensorParallelCommunicator(LocalCommunicator(rank=0, size=1)),
        functions=reference_registry().select(torch.device("cpu"), torch.float32),
        dtype=torch.float32,
        first_layer=0,
        last_layer=config.num_layers,
        is_first=True,
        is_last=True,
    )
    with torch.device("meta"):
        model = model_class(config)(config, context)
    shapes: dict[str, tuple[int, ...]] = {}
    for part in weight_slices(model):
        if isinstance(part, TensorSlice):
            shapes[part.name] = part.shape
        else:
            shapes[f"{part.name}.weight"] = (part.outputs, part.inputs)
    return shapes


def _safetensors_header(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """See https://github.com/huggingface/safetensors#format; the tensors follow in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in shapes.items():
        begin, end = end, end + math.prod(size) * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS[dtype], "shape": size, "data_offsets": (begin, end)}
    header = json.dumps(entries).encode()
    return header + b" " * (-len(header) % 8)


def _write_tokenizer(directory: Path) -> int:
    """Train and write a small tokenizer. Returns its number of tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's own number")
    parser.add_argument("--vocab-size", type=int, default=0, help="instead of the shape's own number")
    parser.add_argument("--faint-from", type=int, help="first of the layers that add little to those before")
    args = parser.parse_args()
    make_checkpoint(
        args.directory,
        args.shape,
        getattr(torch, args.dtype),
        layers=args.layers,
        vocab_size=args.vocab_size,
        faint_from=args.faint_from,
    )
    num_bytes = sum(path.stat().st_size for path in args.directory.iterdir())
    print(f"{args.directory}: {num_bytes / 1e6:.1f} MB in {args.dtype}, of shape {args.shape}, with random weights")


if __name__ == "__main__":
    main()
