"""Other values of every key of ``config.json`` over the same weights: refused in one line, or Transformers' logits."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import CONFIGS, auto_class, make_checkpoint
from config_values import ABSENT, Change, changed, changes
from golden import MOST_GROWTH, NOISE, PROMPTS, TOLERANCE, golden, greedy, recorded, relative_error, worst_error

from labinfer.base.errors import UserError
from labinfer.models.registry import load_config

PROMPT = PROMPTS[3]
"""33 tokens, longer than two windows."""
NUM_TOKENS = 3
OUTCOMES = ("refused", "equal", "unchanged", "nothing", "noisy")
SAMPLE = ("mistral", "gemma3", "qwen3-moe", "deepseek-v3", "gpt-oss")


class Comparison:
    """A checkpoint whose config is changed, and what Transformers and LABInfer make of it.

    Args:
        directory: gets the changed checkpoint.
    """

    def __init__(self, kind: str, directory: Path):
        self._kind, self._directory = kind, directory
        source = make_checkpoint(directory / "source", kind) if kind.endswith("pictures") else golden(kind).directory
        for path in source.iterdir():
            if path.name != "config.json" and not path.name.startswith("reference"):
                (directory / path.name).symlink_to(path)
        self.values = json.loads((source / "config.json").read_text())
        self._write(self.values)
        self._config = load_config(directory)
        self._logits = self._run(self._load(), PROMPT)
        ropes = [rope for layer in self._config.layers if (rope := getattr(layer.mixer, "rope", None)) is not None]
        self.num_frequencies = ropes[0].dim // 2

    def judge(self, change: Change) -> str:
        """Outcome of a change: ``refused``, ``equal``, ``unchanged`` in both, ``nothing`` where Transformers fails, or ``noisy`` where the
        changed model lets noise grow; any other text is a difference."""
        self._write(changed(self.values, change))
        try:
            config = load_config(self._directory)
        except UserError as error:
            return refusal(error)
        try:
            model = self._load()
            logits_TV = self._run(model, PROMPT)
        except Exception:  # noqa: BLE001 - whatever Transformers raises, it has no answer to compare with
            return "nothing"
        if config == self._config and torch.equal(logits_TV, self._logits):
            return "unchanged"
        try:
            options = {"autotune": "off", "functions": "reference", "max_model_len": len(PROMPT) + NUM_TOKENS}
            with recorded(self._directory, **options) as (llm, rows):
                (output,) = greedy(llm, [PROMPT], NUM_TOKENS)
        except UserError as error:
            return refusal(error)
        ids = PROMPT + output.token_ids
        ours_TV = torch.stack([rows[tuple(ids[:end])] for end in range(len(PROMPT), len(ids))])
        theirs_TV = self._run(model, ids[:-1])[-NUM_TOKENS:]
        error = worst_error(ours_TV, theirs_TV)
        if error < TOLERANCE and theirs_TV.argmax(dim=1).tolist() == output.token_ids:
            return "equal"
        embedding, noise = model.get_input_embeddings().weight, 0.0
        exact, generator = embedding.clone(), torch.Generator().manual_seed(5)
        for _ in range(4):  # where two experts tie, one draw of noise may not change the choice
            embedding.copy_(exact * (1 + NOISE * torch.randn(exact.shape, generator=generator)))
            noise = max(noise, worst_error(self._run(model, ids[:-1])[-NUM_TOKENS:], theirs_TV))
        if noise > max(MOST_GROWTH * NOISE, error / 10):
            return "noisy"
        moved = relative_error(logits_TV, self._logits)
        return f"differs by {error:.1e}, and Transformers from itself before by {moved:.1e}"

    def _load(self) -> transformers.PreTrainedModel:
        """Transformers' model.

        Raises:
            ValueError: weights are missing or left over; Transformers raises much else.
        """
        model, info = auto_class(self._kind).from_pretrained(
            self._directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if any(info.values()):
            raise ValueError(f"{info}")
        return model.eval()

    @staticmethod
    @torch.no_grad()
    def _run(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
        """Logits behind each token, (T, V)."""
        return model(torch.tensor([ids])).logits[0]

    def _write(self, values: dict[str, Any]) -> None:
        (self._directory / "config.json").write_text(json.dumps(values))


@pytest.fixture(autouse=True)
def silence():
    """Transformers warns of most changes."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    with torch.no_grad():
        yield
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(level)


def refusal(error: UserError) -> str:
    return "refused" if "\n" not in str(error) else f"{error!r} has several lines"


def text(change: Change) -> str:
    values = {path: "absent" if value is ABSENT else json.dumps(value) for path, value in change.items()}
    return ", ".join(f"{'.'.join(path)} = {value}" for path, value in values.items())


def judge_all(comparison: Comparison, kind: str, most_equal: int) -> Counter:
    """Outcomes of changes, one key at a time, in a seeded order until enough of them changed the logits of both to the same."""
    cases, counts, wrong = changes(kind, comparison.values, comparison.num_frequencies), Counter(), []
    random.Random(kind).shuffle(cases)
    for change in cases:
        outcome = comparison.judge(change)
        counts[outcome] += 1
        if outcome not in OUTCOMES:
            wrong.append(f"{text(change)}: {outcome}")
        if counts["equal"] == most_equal:
            break
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)}:", *wrong])
    return counts


@pytest.mark.parametrize("kind", SAMPLE)
def test_sample_of_other_values_is_obeyed_or_refused(tmp_path, kind):
    assert judge_all(Comparison(kind, tmp_path), kind, 1)["equal"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_other_value_of_a_key_is_obeyed_or_refused(tmp_path, kind):
    counts = judge_all(Comparison(kind, tmp_path), kind, 10_000)
    print(f"{kind}: {dict(counts)}")
    assert counts["noisy"] <= 0.05 * counts.total()
    assert counts["equal"] >= 20
    assert counts["refused"] >= 10
