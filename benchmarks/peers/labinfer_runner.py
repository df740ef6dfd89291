"""Runner of LABInfer's engine, in the Python environment of the comparison."""

from __future__ import annotations

import argparse
import dataclasses

from harness import Generate, OnToken, Unavailable, run
from workloads import find_limits, measure_rates

from labinfer import LLM, SamplingParams
from labinfer.base.config import SECTIONS
from labinfer.cli.bench.workloads import BenchWorkload

QUANTIZATION = {"16-bit": {}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
"""Options by precision; those that are not here are types of a GGUF file, which is read as it is."""


def load(args: argparse.Namespace) -> Generate:
    options = dict(QUANTIZATION.get(args.precision, {}))
    known = {f.name for section in SECTIONS for f in dataclasses.fields(section)}
    if unknown := set(options) - known:
        raise Unavailable(f"this version of LABInfer has no --{unknown.pop()}")
    if args.draft_model:
        options["speculative_config"] = {"model": str(args.draft_model), "num_speculative_tokens": args.draft_tokens}
    llm = LLM(
        str(args.checkpoint if args.precision in QUANTIZATION else args.converted),
        threads=args.threads,
        max_model_len=args.context,
        num_kv_blocks=1600,  # 25,600 tokens
        max_num_batched_tokens=2048,
        chunked_prefill_size=2048,
        enable_prefix_caching=False,  # prompts are repeated
        log_level="warning",
        **options,
    )

    def generate(prompts: list[list[int]], lengths: list[int], on_token: OnToken) -> list[int]:
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
        hear = (lambda delta: on_token()) if len(prompts) == 1 else None
        return [output.num_output_tokens for output in llm.generate(prompts, params, hear)]

    def limits(workloads: dict[str, dict]) -> dict[str, float]:
        works = {name: BenchWorkload(**work) for name, work in workloads.items()}
        return {figure.split()[0]: limit for figure, limit in find_limits(llm, works, measure_rates()).items()}

    if not args.draft_model:  # a decode step with drafts gives several tokens
        generate.find_limits = limits
    return generate


if __name__ == "__main__":
    run("labinfer", load, can_draft=True)
