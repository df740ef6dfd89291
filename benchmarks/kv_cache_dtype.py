"""Loss of a KV cache in fewer bits: held-out conversations with the cache in each dtype, all else in float32.

    python benchmarks/kv_cache_dtype.py

Whole conversations, with the right answers, are run through the model as they stand and measured token by
token; then each question is answered greedily. Most answers of the bundled model are next to certain, so the figures of
all tokens, the users' included, say more than those of its answers. One process.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from pathlib import Path

from labinfer import LLM, SamplingParams
from labinfer.base.config import KV_CACHE_DTYPES
from labinfer.base.plan import TokenLogprobs
from labinfer.observe.table import format_table
from labinfer.text.tokenizer import Tokenizer

HEADER = ("KV cache", "tokens", "perplexity", "mean |Δ logprob|", "largest", "same likeliest token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--per-task", type=int, default=50, metavar="N", help="held-out conversations of each task")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=3, help="of the conversations")
    args = parser.parse_args()

    likelihoods, summary, exact = [], [], None
    for kv_cache_dtype in (name for name in KV_CACHE_DTYPES if name != "auto"):  # float32 is the first
        with LLM(args.model, dtype="float32", device="cpu", kv_cache_dtype=kv_cache_dtype) as llm:
            questions, answers = held_out(llm.tokenizer, args.per_task, args.seed)
            texts = [question + answer for question, answer in zip(questions, answers, strict=True)]
            forced = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=1))
            greedy = llm.generate(questions, SamplingParams(max_tokens=args.output_tokens))
            bytes_per_token = llm.layout.meta(llm.place).bytes_per_token
        measured = {
            "all": [token for output in forced for token in output.prompt_logprobs],
            "answers": [
                t for output, a in zip(forced, answers, strict=True) for t in output.prompt_logprobs[-len(a) :]
            ],
        }
        said = [output.token_ids for output in greedy]
        exact = exact or (measured, said)
        likelihoods += [
            (kv_cache_dtype, which, *compare(tokens, exact[0][which])) for which, tokens in measured.items()
        ]
        same = [ours == theirs for ours, theirs in zip(said, exact[1], strict=True)]
        summary.append((kv_cache_dtype, bytes_per_token, f"{100 * statistics.mean(same):.2f} %"))
    num_all, num_answers = len(exact[0]["all"]), len(exact[0]["answers"])
    print(f"{len(exact[1])} conversations of {num_all} tokens, {num_answers} of them in answers\n")
    print(format_table(HEADER, sorted(likelihoods, key=lambda row: row[1])), end="\n\n")
    print(format_table(("KV cache", "bytes per token", "same greedy answers"), summary))


def held_out(tokenizer: Tokenizer, per_task: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of conversations up to the answer, and of the right answer; training never saw them."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "demo_model"))
    from dialogues import test_set

    sets = test_set(random.Random(seed), per_task, lambda messages: len(tokenizer.encode_chat(messages)))
    conversations = [messages for group in sets.values() for messages in group]
    questions = [tokenizer.encode_chat(messages[:-1]) for messages in conversations]
    answers = [tokenizer.encode(messages[-1]["content"], add_special_tokens=False) for messages in conversations]
    return questions, answers


def compare(tokens: list[TokenLogprobs], exact: list[TokenLogprobs]) -> tuple[str, str, str, str]:
    """Perplexity, mean and largest change of a token's log-probability, and the share of positions at which the likeliest token is the same."""
    changes = [abs(ours.logprob - theirs.logprob) for ours, theirs in zip(tokens, exact, strict=True)]
    same = [next(iter(ours.top)) == next(iter(theirs.top)) for ours, theirs in zip(tokens, exact, strict=True)]
    return (
        f"{math.exp(-statistics.mean(token.logprob for token in tokens)):.4f}",
        f"{statistics.mean(changes):.5f}",
        f"{max(changes):.3f}",
        f"{100 * statistics.mean(same):.2f} %",
    )


if __name__ == "__main__":
    main()
