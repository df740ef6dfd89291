"""Transformers' ``generate``: static batches, padded on the left; all answers run to the longest one."""

from __future__ import annotations

import argparse

import torch
from harness import Generate, OnToken, run
from transformers import AutoModelForCausalLM


def load(args: argparse.Namespace) -> Generate:
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], lengths: list[int], on_token: OnToken) -> list[int]:
        longest = max(map(len, prompts))
        ids_BS = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask_BS = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        most = max(lengths)
        out_BS = model.generate(
            ids_BS, attention_mask=mask_BS, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0
        )
        return [min(length, out_BS.shape[1] - longest) for length in lengths]

    return generate


if __name__ == "__main__":
    run("transformers", load)
