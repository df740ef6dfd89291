"""llama.cpp over its C API (llama-cpp-python), with flash attention and a loop that batches as its server does."""

from __future__ import annotations

import argparse
import ctypes
import json
import re
from collections import deque
from pathlib import Path

import gguf
import llama_cpp as lib
import numpy as np
from harness import Generate, Unavailable, run

FILE_TYPES = {"int8": lib.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": lib.LLAMA_FTYPE_MOSTLY_Q4_0}
CONTEXT, BATCH_TOKENS, MICRO_BATCH_TOKENS, SEQUENCES = 16384, 2048, 512, 32
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
ARCHITECTURES = {"qwen2": "qwen2", "qwen3_moe": "qwen3moe"}
"""llama.cpp's names by model type, of those that the converter knows."""


def prepare(args: argparse.Namespace) -> None:
    """A GGUF file of a bfloat16 Qwen2 or Qwen3-MoE checkpoint without its tokenizer, quantised by llama.cpp where that is asked."""
    plain = args.model.with_suffix(".bf16")
    _write_gguf(args.checkpoint, plain if args.precision in FILE_TYPES else args.model)
    if args.precision in FILE_TYPES:
        params = lib.llama_model_quantize_default_params()
        params.ftype, params.nthread = FILE_TYPES[args.precision], args.threads
        failed = lib.llama_model_quantize(str(plain).encode(), str(args.model).encode(), ctypes.byref(params))
        plain.unlink()
        if failed:
            raise RuntimeError(f"llama_model_quantize answered {failed}")


def load(args: argparse.Namespace) -> Generate:
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    model = lib.llama_model_load_from_file(str(args.model).encode(), params)
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT, BATCH_TOKENS, MICRO_BATCH_TOKENS
    options.n_seq_max, options.kv_unified = SEQUENCES, True
    options.n_threads = options.n_threads_batch = args.threads
    options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = lib.llama_init_from_model(model, options)
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        waiting = deque(
            (sequence, position, token)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        )
        answers: list[list[int]] = [[] for _ in prompts]
        running: list[int] = []  # sequences whose last token is yet to be run
        while waiting or running:
            rows = [
                (sequence, len(prompts[sequence]) + len(answers[sequence]) - 1, answers[sequence][-1])
                for sequence in running
            ]
            while waiting and len(rows) < BATCH_TOKENS:
                rows.append(waiting.popleft())
            batch.n_tokens = len(rows)
            for row, (sequence, position, token) in enumerate(rows):
                batch.token[row], batch.pos[row] = token, position
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                batch.logits[row] = position >= len(prompts[sequence]) - 1
            if failed := lib.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode answered {failed}")
            running = []
            for row, (sequence, position, _) in enumerate(rows):
                if position >= len(prompts[sequence]) - 1:
                    logits_V = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, row), shape=(vocabulary,))
                    answers[sequence].append(int(logits_V.argmax()))
                    if len(answers[sequence]) < lengths[sequence]:
                        running.append(sequence)
        return [len(answer) for answer in answers]

    return generate


def _write_gguf(checkpoint: Path, path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        raise Unavailable(f"model type {config['model_type']}; this converter knows {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    stacks: dict[str, dict[int, np.ndarray]] = {}  # by name: the experts' matrices, which are one tensor there
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, bits in _read_bfloat16(file):
            if expert := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name):
                layer, number, part = expert.groups()
                stacks.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[int(number)] = bits
            elif bits.ndim == 1 or name.endswith(".mlp.gate.weight"):  # norms, biases and routers are in float32 there
                writer.add_tensor(_gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
            else:
                writer.add_tensor(_gguf_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    for name, experts in stacks.items():
        bits_EOI = np.stack([experts[number] for number in sorted(experts)])
        writer.add_tensor(name, bits_EOI.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read_bfloat16(file: Path):
    """Names and bits (uint16) of the tensors of a safetensors file; NumPy has no bfloat16."""
    data = np.memmap(file, np.uint8, mode="r")
    header_bytes = int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(data[8 : 8 + header_bytes])).items():
        if name != "__metadata__":
            if entry["dtype"] != "BF16":
                raise RuntimeError(f"{name} is {entry['dtype']}; this converter reads bfloat16 checkpoints")
            begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
            yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def _gguf_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` → ``blk.3.ffn_up.weight``."""
    if name in NAMES:
        return NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


if __name__ == "__main__":
    run("llama-cpp-python", load, prepare)
