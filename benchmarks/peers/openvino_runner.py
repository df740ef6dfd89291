"""OpenVINO GenAI with continuous batching: 16-bit, int8 or int4 weights (groups of 128) or a GGUF file, arithmetic in float32 or bfloat16.

Its own choice is bfloat16 where the processor has it, which is slower where that instruction runs at half the speed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from harness import Generate, OnToken, Unavailable, run

WEIGHTS = {
    "16-bit": ["--weight-format", "fp16"],
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "128", "--ratio", "1.0"],
}


def prepare(args: argparse.Namespace) -> None:
    """Convert with optimum-intel.

    Raises:
        Unavailable: it is to be a GGUF file, which llama.cpp makes.
    """
    if args.precision not in WEIGHTS:
        raise Unavailable(f"no {args.converted.name}: llama.cpp makes it, as --engines with llamacpp has it")
    export = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(args.checkpoint)]
    task = ["--task", "text-generation-with-past"]
    subprocess.run([*export, *task, *WEIGHTS[args.precision], str(args.model)], check=True, stdout=sys.stderr)


def load(args: argparse.Namespace) -> Generate:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": args.threads, "INFERENCE_PRECISION_HINT": args.variant or "f32"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(args.model), scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], lengths: list[int], on_token: OnToken) -> list[int]:
        ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        configs = [_config(length) for length in lengths]
        streamer = _Streamer(on_token) if len(prompts) == 1 else None
        return [len(result.m_generation_ids[0]) for result in pipeline.generate(ids, configs, streamer)]

    return generate


class _Streamer(openvino_genai.StreamerBase):
    """Tells of each token.

    Args:
        on_token: called then.
    """

    def __init__(self, on_token: OnToken):
        super().__init__()
        self._on_token = on_token

    def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
        self._on_token()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def _config(length: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = length
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    run("openvino-genai", load, prepare)
