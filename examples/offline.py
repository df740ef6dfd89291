"""The Python API, alone or on many ranks. Every rank runs this script; rank 0 gets the outputs, the others None.

    python examples/offline.py
    torchrun --nproc-per-node 2 examples/offline.py --tensor-parallel-size 2
    mpirun -n 3 python examples/offline.py --tensor-parallel-size 2,1

Other options of launch.py are keyword arguments of LLM, with underscores.
"""

from __future__ import annotations

import argparse

from labinfer import LLM, SamplingParams

PROMPTS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "把34, 14, 79从小到大排列。"}],
    [{"role": "user", "content": "Who are you?"}],
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate for three prompts through labinfer.LLM.")
    parser.add_argument("model", nargs="?", default="demo", help="as launch.py --model takes it (default: demo)")
    parser.add_argument("--tensor-parallel-size", default="1", help="one number, or one per stage such as 2,1")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()

    with LLM(args.model, tensor_parallel_size=args.tensor_parallel_size) as llm:
        greedy = SamplingParams(max_tokens=args.max_tokens)
        sampled = SamplingParams(max_tokens=args.max_tokens, temperature=0.8, top_p=0.95, seed=7)
        outputs = llm.generate(PROMPTS, [greedy, greedy, sampled])
        for output in outputs or []:
            print(f"--- prompt {output.key}: {len(output.prompt_token_ids)} tokens, ended by {output.finish_reason}")
            print(output.text, flush=True)


if __name__ == "__main__":
    main()
