"""CTranslate2 with int8 weights: static batches; all answers run to the longest one."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import ctranslate2
from harness import Generate, OnToken, run


def prepare(args: argparse.Namespace) -> None:
    """Convert the checkpoint with CTranslate2's own tool."""
    convert = str(Path(sys.executable).with_name("ct2-transformers-converter"))
    where = ["--model", str(args.checkpoint), "--output_dir", str(args.model)]
    subprocess.run([convert, *where, "--quantization", "int8", "--force"], check=True, stdout=sys.stderr)


def load(args: argparse.Namespace) -> Generate:
    generator = ctranslate2.Generator(str(args.model), compute_type="int8", inter_threads=1, intra_threads=args.threads)
    vocabulary = json.loads((args.model / "vocabulary.json").read_text())

    def generate(prompts: list[list[int]], lengths: list[int], on_token: OnToken) -> list[int]:
        most = max(lengths)
        results = generator.generate_batch(
            [[vocabulary[token] for token in prompt] for prompt in prompts],
            max_length=most,
            min_length=most,
            beam_size=1,
            sampling_topk=1,
            end_token=[],
            include_prompt_in_result=False,
        )
        return [min(length, len(result.sequences_ids[0])) for length, result in zip(lengths, results)]  # noqa: B905

    return generate


if __name__ == "__main__":
    run("ctranslate2", load, prepare)
