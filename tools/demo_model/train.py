"""Train the demo model and its draft sibling from nothing, and write both as Hugging Face directories.

    python tools/demo_model/train.py --output labinfer/assets

First plain lines of a question and its answer, packed densely, teach the tasks; then whole dialogues in the chat format,
most of them short, some as long as a recalled name needs. Only answers count in the loss. Matrices are trained by Muon
(Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), the rest by AdamW. The step numbers, not the clock,
decide when it ends, so that a seed gives the same model again on the same machine.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from dialogues import Message, conversation, recall, test_set, turn
from tasks import EARLY_SHARES, LATE_SHARES, Shares
from tokenizer import IM_END, IM_START, render, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

BATCH_TOKENS = 3072
LINE_LENGTH = 128
"""Tokens of a packed row of plain lines."""
POOL = 1024
"""Dialogues that are drawn together and sorted by length, so that a batch wastes little on padding."""
RECALL_SHARE = 0.06
"""Share of recalls among the dialogues; they are long, so that they take about a third of the tokens."""


@dataclass(frozen=True)
class Phase:
    """A part of the training; it starts from the weights that the one before it saved, with fresh optimizers."""

    kind: str
    """``lines`` or ``chat``."""
    steps: int
    first_rate: float
    last_rate: float
    """The learning rates fall from the first to the last, in parts of the full ones."""
    shares: Shares


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The shape of a model, and its training."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    phases: tuple[Phase, ...]


MODEL = Recipe(
    name="demo", hidden_size=192, num_layers=6, num_heads=6, intermediate_size=512,
    phases=(
        Phase("lines", 4500, 1.0, 1.0, EARLY_SHARES),
        Phase("lines", 1500, 0.6, 0.5, LATE_SHARES),
        Phase("chat", 5300, 0.5, 0.0, LATE_SHARES),
    ),
)  # fmt: skip
DRAFT = Recipe(
    name="demo-draft", hidden_size=128, num_layers=2, num_heads=4, intermediate_size=320,
    phases=(Phase("lines", 600, 1.0, 1.0, EARLY_SHARES), Phase("chat", 1800, 1.0, 0.0, EARLY_SHARES)),
)  # fmt: skip
MATRIX_RATE, OTHER_RATE = 0.02, 2e-3
WARMUP_STEPS = 100
WEIGHTS = "model.safetensors"
SAMPLING = {"temperature": 0.3, "top_k": 20, "top_p": 0.5}
"""Recommended to users: few likely tokens, as a model this small knows little beside them. Temperature 1 then makes sense, too."""
NUM_KV_HEADS = 2
CONTEXT = 2048


@dataclass(frozen=True)
class Batch:
    """Right-padded token ids ``[rows, length]``, and which next tokens the loss counts: ``[n]`` places and ids."""

    ids: Tensor
    places: Tensor
    targets: Tensor


class Corpus:
    """Endless batches of one seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int, shares: Shares = EARLY_SHARES):
        self._tokenizer, self._shares = tokenizer, shares
        self._rng = random.Random(seed)
        self._end = tokenizer.token_to_id(IM_END)
        self._answer = self._encode(f"{IM_START}assistant\n")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def count_tokens(self, messages: list[Message]) -> int:
        """Number of tokens of a conversation in the chat format."""
        return len(self._encode(render(messages)))

    def lines(self) -> Iterator[Batch]:
        """Rows packed with ``question, newline, answer, end``."""
        row: tuple[list[int], list[bool]] = ([], [])
        rows = []
        while True:
            made = turn(self._rng, held_out=False, shares=self._shares)
            question, answer = self._encode(made.user + "\n"), [*self._encode(made.assistant), self._end]
            if len(row[0]) + len(question) + len(answer) > LINE_LENGTH:
                rows.append(row)
                row = ([], [])
                if len(rows) == BATCH_TOKENS // LINE_LENGTH:
                    yield _batch(rows)
                    rows = []
            row[0].extend(question + answer)
            row[1].extend([False] * len(question) + [True] * len(answer))

    def dialogues(self) -> Iterator[Batch]:
        """Rows of one dialogue each, in the chat format; the rows of a batch have about the same length."""
        while True:
            pool = sorted((self._dialogue() for _ in range(POOL)), key=lambda row: len(row[0]))
            batches, rows = [], []
            for row in pool:
                if rows and len(row[0]) * (len(rows) + 1) > BATCH_TOKENS:
                    batches.append(rows)
                    rows = []
                rows.append(row)
            self._rng.shuffle(batches)  # the last rows, too few for a batch, are left out
            yield from map(_batch, batches)

    def last_answer(self, messages: list[Message], kind: str) -> Batch:
        """One conversation, of which only the last answer counts; as a line, its last question alone."""
        if kind == "lines":
            prompt = self._encode(messages[-2]["content"] + "\n")
        else:
            prompt = self._encode(render(messages[:-1])) + self._answer
        answer = [*self._encode(messages[-1]["content"]), self._end]
        return _batch([(prompt + answer, [False] * len(prompt) + [True] * len(answer))])

    def _dialogue(self) -> tuple[list[int], list[bool]]:
        if self._rng.random() < RECALL_SHARE:
            messages = recall(self._rng, held_out=False, count_tokens=self.count_tokens, shares=self._shares)
        else:
            messages = conversation(self._rng, self._shares)
        ids, counts = [], []
        for message in messages:
            piece = self._encode(render([message]))
            ids += piece
            if message["role"] == "assistant":  # the newline after <|im_end|> is nobody's to predict
                counts += [False] * len(self._answer) + [True] * (len(piece) - len(self._answer) - 1) + [False]
            else:
                counts += [False] * len(piece)
        return ids, counts


def _batch(rows: list[tuple[list[int], list[bool]]]) -> Batch:
    length = max(len(ids) for ids, _ in rows)
    padded = torch.zeros((len(rows), length), dtype=torch.long)
    counts = torch.zeros((len(rows), length), dtype=torch.bool)
    for index, (ids, counted) in enumerate(rows):
        padded[index, : len(ids)] = torch.tensor(ids)
        counts[index, : len(ids)] = torch.tensor(counted)
    counts[:, 0] = False
    (targets,) = counts.flatten().nonzero(as_tuple=True)
    return Batch(padded, targets - 1, padded.flatten()[targets])


class Muon:
    """Momentum whose step is brought near an orthogonal matrix by five Newton-Schulz iterations, in fp32.

    ``torch.optim.Muon`` iterates in bfloat16, which CPUs without matrix units for it do slowly; here matrices of one
    shape go through in one batch.
    """

    def __init__(self, parameters: list[Tensor], momentum: float = 0.95, weight_decay: float = 0.05):
        self._momentum, self._weight_decay = momentum, weight_decay
        self._groups: dict[tuple[int, int], list[Tensor]] = {}
        for parameter in parameters:
            rows, columns = parameter.shape
            self._groups.setdefault((min(rows, columns), max(rows, columns)), []).append(parameter)
        self._momenta = {id(parameter): torch.zeros_like(parameter) for parameter in parameters}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the model's weights from the accumulated gradients, at learning rate ``rate``."""
        for group in self._groups.values():
            steps = []
            for parameter in group:
                momentum = self._momenta[id(parameter)]
                momentum.lerp_(parameter.grad, 1 - self._momentum)
                step = parameter.grad.lerp(momentum, self._momentum)
                steps.append(step if step.shape[0] <= step.shape[1] else step.T)
            for parameter, step in zip(group, _orthogonal(torch.stack(steps)), strict=True):
                rows, columns = parameter.shape
                parameter.mul_(1 - rate * self._weight_decay)
                parameter.add_(step if rows <= columns else step.T, alpha=-rate * max(1, rows / columns) ** 0.5)


def _orthogonal(matrices: Tensor) -> Tensor:
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x


def build(recipe: Recipe, tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """A Qwen2 of this shape with random weights."""
    end = tokenizer.token_to_id(IM_END)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
        use_cache=True,
    )
    return Qwen2ForCausalLM(config)


def train(recipe: Recipe, tokenizer: Tokenizer, seed: int, directory: Path, first_phase: int) -> None:
    """Train one model, phase by phase; its weights are in ``directory`` after each, and every 500 steps.

    Args:
        first_phase: counted from 1; a later one goes on with the weights that are there.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    for number, phase in enumerate(recipe.phases, start=1):
        if number < first_phase:
            continue
        if number == 1:
            model = build(recipe, tokenizer)
        else:
            model = Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32)
        print(f"{recipe.name}, phase {number}: {model.num_parameters():,} parameters on {device}", flush=True)
        corpus = Corpus(tokenizer, seed + number - 1, phase.shares)
        _run(phase, model.to(device).train(), corpus, lambda trained: save_model(trained, directory))


def _run(phase: Phase, model: Qwen2ForCausalLM, corpus: Corpus, save: Callable[[Qwen2ForCausalLM], None]) -> None:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    probe = _probe(corpus, phase.kind)
    batches = corpus.lines() if phase.kind == "lines" else corpus.dialogues()
    started, tokens, losses = time.monotonic(), 0, []
    for step in range(phase.steps):
        batch = next(batches)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            loss, _ = _loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = phase.first_rate + (phase.last_rate - phase.first_rate) * step / phase.steps
        rate *= min(1, (step + 1) / WARMUP_STEPS)
        muon.step(MATRIX_RATE * rate)
        adam.param_groups[0]["lr"] = OTHER_RATE * rate
        adam.step()
        model.zero_grad()
        tokens += batch.ids.numel()
        losses.append(loss.detach())
        if (step + 1) % 100 == 0:
            seconds = time.monotonic() - started
            mean = torch.stack(losses).mean().item()
            print(f"step {step + 1} loss {mean:.4f} {seconds:.0f} s {tokens / seconds:.0f} tokens/s", flush=True)
            losses = []
        if (step + 1) % 500 == 0 or step + 1 == phase.steps:
            print("  " + " ".join(f"{task} {right:.0%}" for task, right in _exact(model, probe).items()), flush=True)
            save(model)


def _loss(model: Qwen2ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy over the counted tokens, and which of them are the likeliest, ``[n]``."""
    hidden = model.model(input_ids=batch.ids.to(model.device), use_cache=False).last_hidden_state
    logits = model.lm_head(hidden.flatten(0, 1)[batch.places.to(model.device)]).float()
    targets = batch.targets.to(model.device)
    return functional.cross_entropy(logits, targets), logits.argmax(-1) == targets


def save_model(model: Qwen2ForCausalLM, directory: Path) -> None:
    """Write the weights in bfloat16, with the configuration, and the sampling that suits a model this small."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)
    (directory / WEIGHTS).chmod(0o644)  # safetensors writes for the owner alone; an installed package has many readers
    end = model.config.eos_token_id
    GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=True, **SAMPLING).save_pretrained(directory)


def _probe(corpus: Corpus, kind: str) -> dict[str, list[Batch]]:
    """A few dozen held-out conversations of each task, one a batch, in which only the last answer counts."""
    sets = test_set(random.Random(1), 40, corpus.count_tokens)
    return {
        task: [corpus.last_answer(messages, kind) for messages in conversations]
        for task, conversations in sets.items()
        if kind == "chat" or task != "recall"
    }


@torch.no_grad()
def _exact(model: Qwen2ForCausalLM, probe: dict[str, list[Batch]]) -> dict[str, float]:
    """The share of conversations whose last answer is the likeliest at every token, which greedy decoding would say."""
    return {
        task: sum(_loss(model, batch)[1].all().item() for batch in batches) / len(batches)
        for task, batches in probe.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="where demo/ and demo-draft/ go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=(MODEL.name, DRAFT.name), help="train just this one")
    parser.add_argument(
        "--from-phase", type=int, default=1, metavar="N", help="go on with --only's weights in --output"
    )
    parser.add_argument("--steps-share", type=float, default=1.0, metavar="F", help="a part of the steps, to try it")
    args = parser.parse_args()
    recipes = [recipe for recipe in (MODEL, DRAFT) if args.only in (None, recipe.name)]
    if not 0 < args.steps_share <= 1:
        parser.error(f"--steps-share must be above 0 and at most 1, not {args.steps_share}")
    if args.from_phase > 1 and not (args.only and (args.output / args.only / WEIGHTS).exists()):
        parser.error("--from-phase needs --only, and that model's weights in --output")
    if not 1 <= args.from_phase <= len(recipes[0].phases):
        parser.error(f"--from-phase must be from 1 to {len(recipes[0].phases)}, not {args.from_phase}")

    tokenizer = train_tokenizer(args.seed)
    for recipe in recipes:
        phases = tuple(replace(phase, steps=max(1, round(phase.steps * args.steps_share))) for phase in recipe.phases)
        directory = args.output / recipe.name
        directory.mkdir(parents=True, exist_ok=True)
        save_tokenizer(tokenizer, directory)
        train(replace(recipe, phases=phases), tokenizer, args.seed, directory, args.from_phase)


if __name__ == "__main__":
    main()
