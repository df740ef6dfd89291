"""Checkpoints with Transformers' answers beside them, which stay between runs: Transformers takes long for them."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import checkpoints
import torch
import transformers
from checkpoints import (
    CONFIGS,
    HYBRIDS,
    make_checkpoint,
    mixed_prompts,
    transformers_beams,
    transformers_choices,
    transformers_greedy,
)
from safetensors.torch import load_file, save_file

from labinfer import LLM, SamplingParams
from labinfer.native.compiler import default_cache

PROMPTS = mixed_prompts()
LONG = 1
"""Index of the prompt of 90 tokens: its last full block of 4 before its end ends at 88."""
NUM_TOKENS = 64
BEAM_PROMPTS = PROMPTS[2:4]
BEAMS = {"num_beams": 3, "max_tokens": 12}
NUM_STEPS = 16
"""The last tokens of an answer, which Transformers computes one by one, too: all for hybrids, whose two orders of sums differ by more."""
NOISE = 1e-5
TOLERANCE = 1e-4
"""Difference of logits, relative to the largest."""
OWN_ERROR = 4e-5
"""The same between two orders of sums in the reference itself, at most, for a model to be one that is tested with. Processors without AVX-512
come to 2e-5 and 3e-5 with models that have 1e-5 and 2e-5 elsewhere."""
MOST_GROWTH, MOST_GROWTH_OF_HYBRIDS = 100, 300
"""How much more the logits of such a model may change than the embeddings do, at most: a model that lets noise grow 170 times
makes 1e-4 of what float32 rounds. Hybrids do better, in some of which it grows 250 times; with 380 the reference differs from itself
by 9e-5."""


@dataclass(frozen=True)
class Golden:
    """A checkpoint, and what Transformers makes of ``PROMPTS`` with it."""

    directory: Path

    @cached_property
    def _answers(self) -> dict:
        return json.loads((self.directory / "reference.json").read_text())

    @property
    def tokens(self) -> list[list[int]]:
        """Greedy answers, ``NUM_TOKENS`` long."""
        return self._answers["tokens"]

    @property
    def beams(self) -> list[list[list[int]]]:
        """Answers to ``BEAM_PROMPTS`` by beam search, the best first."""
        return self._answers["beams"]

    @cached_property
    def logits(self) -> torch.Tensor:
        """(prompts, ``NUM_TOKENS``, V): what the greedy tokens were chosen from."""
        return load_file(self.directory / "reference.safetensors")["logits"]


def golden_folder(kind: str) -> Path:
    """Where the checkpoint of this kind is kept: another place when what it is made of changes."""
    limits = NUM_TOKENS, NUM_STEPS, TOLERANCE, BEAMS, NOISE, OWN_ERROR, most_growth(kind)
    # Other kinds may come without this one made again.
    functions = Path(checkpoints.__file__).read_text().partition("\ndef ")[2]
    parts = functions, CONFIGS[kind]().to_json_string(), *limits, transformers.__version__, torch.__version__
    return default_cache() / "tests" / hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@cache
def golden(kind: str) -> Golden:
    """The checkpoint of this kind, made if it is not there yet."""
    folder = golden_folder(kind)
    if not (folder / kind).exists():
        folder.mkdir(parents=True, exist_ok=True)
        for seed in range(20):
            with tempfile.TemporaryDirectory(dir=folder) as unfinished:
                directory = make_checkpoint(Path(unfinished) / kind, kind, seed)
                if answer_with_transformers(directory, kind):
                    with suppress(OSError):  # another run was faster
                        directory.rename(folder / kind)
                    break
        assert (folder / kind).exists(), f"no random {kind} answers clearly"
    return Golden(folder / kind)


def make_goldens(kinds: Iterable[str]) -> None:
    """Make those that are not there yet, on all cores."""
    missing = [kind for kind in dict.fromkeys(kinds) if not (golden_folder(kind) / kind).exists()]
    if len(missing) > 1:
        with ProcessPoolExecutor(
            os.cpu_count(), multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool:
            list(pool.map(golden, missing))


def most_growth(kind: str) -> int:
    """The most that a checkpoint of this kind may let noise grow."""
    return MOST_GROWTH_OF_HYBRIDS if kind in HYBRIDS else MOST_GROWTH


def answer_with_transformers(directory: Path, kind: str) -> bool:
    """Write ``reference.json`` and ``reference.safetensors``, which is no part of the checkpoint by its name.

    Returns whether the answers are clear: logits of single steps agree with those of whole sequences, and noise in the embeddings
    comes to no other token or expert. Random weights can make a model in which float32 does not suffice for that; most such
    models are told by the prompts alone, in a tenth of the time.
    """
    if is_changed_by_noise(directory, kind, PROMPTS, transformers_choices(directory, PROMPTS)):
        return False
    tokens, ran, choices, logits = transformers_answers(directory)
    if largest(logits) != tokens:  # single steps and whole sequences come to different tokens
        return False
    num_steps, limit = (NUM_TOKENS, TOLERANCE) if kind in HYBRIDS else (NUM_STEPS, OWN_ERROR)
    begun = [prompt + answer[:-num_steps] for prompt, answer in zip(PROMPTS, tokens, strict=True)]
    steps = transformers_greedy(directory, begun, num_steps)
    for answer, step, all_TV in zip(tokens, steps, logits, strict=True):
        if step["token_ids"] != answer[-num_steps:] or worst_error(step["logits"], all_TV[-num_steps:]) > limit:
            return False
    if is_changed_by_noise(directory, kind, ran, (choices, logits)):
        return False
    beams = transformers_beams(directory, BEAM_PROMPTS, BEAMS["num_beams"], BEAMS["max_tokens"])
    (directory / "reference.json").write_text(json.dumps({"tokens": tokens, "beams": beams, "choices": choices}))
    chosen = [
        torch.cat([all_TV[-NUM_TOKENS:-num_steps], step["logits"]]) for all_TV, step in zip(logits, steps, strict=True)
    ]
    save_file({"logits": torch.stack(chosen)}, directory / "reference.safetensors")
    return True


def transformers_answers(directory: Path) -> tuple[list[list[int]], list[list[int]], dict, list[torch.Tensor]]:
    """Transformers' greedy answers, the sequences that it ran for them, and what ``transformers_choices`` says of those.

    Our answers stand in for drafts: where Transformers itself would choose each of their tokens behind those before it, they
    are its answers, and it has read them whole, which takes a tenth of the time of writing them. Otherwise it writes them.
    """

    def read(tokens: list[list[int]]) -> tuple[list[list[int]], list[list[int]], dict, list[torch.Tensor]]:
        ran = [prompt + answer[:-1] for prompt, answer in zip(PROMPTS, tokens, strict=True)]
        return tokens, ran, *transformers_choices(directory, ran)

    with recorded(directory, weight_cache_size=0) as (llm, _):  # nothing is left for the tests that use it
        drafted = read([output.token_ids for output in greedy(llm)])
    if largest(drafted[-1]) == drafted[0]:
        return drafted
    return read([answer["token_ids"] for answer in transformers_greedy(directory, PROMPTS, NUM_TOKENS)])


def largest(logits: list[torch.Tensor]) -> list[list[int]]:
    """The tokens with the largest of the last ``NUM_TOKENS`` logits of each sequence."""
    return [all_TV[-NUM_TOKENS:].argmax(1).tolist() for all_TV in logits]


def is_changed_by_noise(directory: Path, kind: str, sequences: list[list[int]], exact: tuple[dict, list]) -> bool:
    """Whether noise in the embeddings comes to another token behind the sequences or another expert, or grows too much.

    Args:
        exact: what ``transformers_choices`` gives for these sequences without noise.
    """
    (choices, logits), (noisy_choices, noisy) = exact, transformers_choices(directory, sequences, NOISE)
    if (choices, largest(logits)) != (noisy_choices, largest(noisy)):
        return True
    return max(map(worst_error, noisy, logits)) > most_growth(kind) * NOISE


# Runs in this process.


class LogitsRecorder:
    """Stands before the sampler and keeps each row's logits by its tokens."""

    def __init__(self, sampler):
        self._sampler, self.rows, self.process_beams = sampler, {}, sampler.process_beams

    def __call__(self, logits_BV, rows):
        for logits_V, row in zip(logits_BV, rows, strict=True):
            self.rows[tuple(row.token_ids)] = logits_V.clone()
        return self._sampler(logits_BV, rows)


@contextmanager
def recorded(checkpoint: Path, **options) -> Iterator[tuple[LLM, dict[tuple[int, ...], torch.Tensor]]]:
    """An ``LLM`` with small blocks, and the logits that it samples from, by all tokens before them."""
    with LLM(str(checkpoint), **{"block_size": 4, "num_kv_blocks": 400} | options) as llm:
        runner = llm._parts.worker.runner
        runner.sampler = recorder = LogitsRecorder(runner.sampler)
        yield llm, recorder.rows


def greedy(llm: LLM, prompts: list[list[int]] = PROMPTS, num_tokens: int = NUM_TOKENS) -> list:
    """Outputs of so many tokens, whatever they are."""
    return llm.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))


def check_captured(directory: Path, caplog) -> None:
    """Check that steps of the compiled functions in bfloat16 are captured whole.

    Without tuning: of a vocabulary as small as these a tuner may find torch's functions faster on a busy machine.
    """
    with caplog.at_level(logging.DEBUG, "labinfer"), recorded(directory, dtype="bfloat16", autotune="off") as (llm, _):
        (output,) = greedy(llm, PROMPTS[2:3], 4)
    assert len(output.token_ids) == 4
    assert not [record.message for record in caplog.records if "cannot be captured" in record.message]


def relative_error(logits_V: torch.Tensor, wanted_V: torch.Tensor) -> float:
    """Largest |difference|, relative to the largest |logit|."""
    return float((logits_V - wanted_V).abs().max() / wanted_V.abs().max())


def worst_error(logits_TV: Iterable[torch.Tensor], wanted_TV: Iterable[torch.Tensor]) -> float:
    """The largest ``relative_error`` of a row."""
    return max(map(relative_error, logits_TV, wanted_TV))


def check_answers(outputs: list, rows: dict, tokens: list[list[int]], logits: Iterable[torch.Tensor]) -> None:
    """Tokens and logits are Transformers'."""
    for output, answer, logits_TV in zip(outputs, tokens, logits, strict=True):
        assert output.token_ids == answer
        for step, wanted_V in enumerate(logits_TV):
            assert relative_error(rows[(*output.prompt_token_ids, *answer[:step])], wanted_V) < TOLERANCE
