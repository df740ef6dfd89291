"""Train the demo model and its draft sibling from nothing, and write both as Hugging Face directories.

    python tools/demo_model/train.py --output labinfer/assets

Two phases: plain lines of a question and its answer, packed densely, teach the tasks; then whole dialogues in the
chat format, most of them short, some as long as a recalled name needs. Only answers count in the loss.
Matrices are trained by Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), the rest by AdamW. The
step numbers, not the clock, decide when it ends, so that a seed gives the same model again on the same machine.
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
"""Of the dialogues; they are long, so that they take about a third of the tokens."""


@dataclass(frozen=True)
class Recipe:
    """One model's shape and its training. Learning rates are those after warm-up."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    line_steps: int
    """Steps on plain lines."""
    chat_steps: int
    matrix_rate: float = 0.02
    other_rate: float = 2e-3
    warmup_steps: int = 100
    decay_share: float = 0.4
    """The last part of all steps, over which the rates fall to zero."""


MODEL = Recipe("demo", 192, 6, 6, 512, line_steps=5000, chat_steps=6000)
DRAFT = Recipe("demo-draft", 128, 2, 4, 320, line_steps=1200, chat_steps=1800)
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

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._end = tokenizer.token_to_id(IM_END)
        self._answer = self._encode(f"{IM_START}assistant\n")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def count_tokens(self, messages: list[Message]) -> int:
        return len(self._encode(render(messages)))

    def lines(self) -> Iterator[Batch]:
        """Rows packed with ``question, newline, answer, end``."""
        row: tuple[list[int], list[bool]] = ([], [])
        rows = []
        while True:
            made = turn(self._rng, held_out=False)
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

    def last_answer(self, messages: list[Message]) -> Batch:
        """One conversation, of which only the last answer counts."""
        prompt = self._encode(render(messages[:-1])) + self._answer
        answer = [*self._encode(messages[-1]["content"]), self._end]
        return _batch([(prompt + answer, [False] * len(prompt) + [True] * len(answer))])

    def _dialogue(self) -> tuple[list[int], list[bool]]:
        if self._rng.random() < RECALL_SHARE:
            messages = recall(self._rng, held_out=False, count_tokens=self.count_tokens)
        else:
            messages = conversation(self._rng)
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
    (wanted,) = counts.flatten().nonzero(as_tuple=True)
    return Batch(padded, wanted - 1, padded.flatten()[wanted])


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


def train(
    recipe: Recipe, tokenizer: Tokenizer, seed: int, save: Callable[[Qwen2ForCausalLM], None]
) -> Qwen2ForCausalLM:
    """Train one model; ``save`` is called now and then, and at the end."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(recipe, tokenizer).to(device).train()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    corpus = Corpus(tokenizer, seed)
    probe = _probe(corpus)
    batches = {"lines": corpus.lines(), "chat": corpus.dialogues()}
    total = recipe.line_steps + recipe.chat_steps
    print(
        f"{recipe.name}: {sum(p.numel() for p in model.parameters()):,} parameters, {total} steps on {device}",
        flush=True,
    )

    started, tokens, losses = time.monotonic(), 0, []
    for step in range(total):
        batch = next(batches["lines" if step < recipe.line_steps else "chat"])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, _ = _loss(model, batch, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        share = min(1, (step + 1) / recipe.warmup_steps, (total - step) / (recipe.decay_share * total))
        muon.step(recipe.matrix_rate * share)
        adam.param_groups[0]["lr"] = recipe.other_rate * share
        adam.step()
        model.zero_grad()
        tokens += batch.ids.numel()
        losses.append(loss.detach())
        if (step + 1) % 100 == 0:
            seconds = time.monotonic() - started
            mean = torch.stack(losses).mean().item()
            print(f"step {step + 1} loss {mean:.4f} {seconds:.0f} s {tokens / seconds:.0f} tokens/s", flush=True)
            losses = []
        if (step + 1) % 500 == 0 or step + 1 == total:
            print(
                "  " + " ".join(f"{task} {right:.0%}" for task, right in _exact(model, probe, device).items()),
                flush=True,
            )
            save(model)
    return model


def _loss(model: Qwen2ForCausalLM, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy over the counted tokens, and which of them are the likeliest, ``[n]``."""
    hidden = model.model(input_ids=batch.ids.to(device), use_cache=False).last_hidden_state
    logits = model.lm_head(hidden.flatten(0, 1)[batch.places.to(device)]).float()
    targets = batch.targets.to(device)
    return functional.cross_entropy(logits, targets), logits.argmax(-1) == targets


def save_model(model: Qwen2ForCausalLM, directory: Path) -> None:
    """Write the weights in bfloat16, with the configuration; decoding is greedy unless a request says otherwise."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)
    end = model.config.eos_token_id
    GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False).save_pretrained(directory)


def _probe(corpus: Corpus) -> dict[str, list[Batch]]:
    """A few dozen held-out conversations of each task, one a batch, in which only the last answer counts."""
    sets = test_set(random.Random(1), 40, corpus.count_tokens)
    return {task: [corpus.last_answer(messages) for messages in conversations] for task, conversations in sets.items()}


@torch.no_grad()
def _exact(model: Qwen2ForCausalLM, probe: dict[str, list[Batch]], device: torch.device) -> dict[str, float]:
    """The share of conversations whose last answer is the likeliest at every token, which greedy decoding would say."""
    return {task: sum(_loss(model, batch, device)[1].all().item() for batch in batches) / len(batches)
            for task, batches in probe.items()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("labinfer/assets"), help="where demo/ and demo-draft/ go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=(MODEL.name, DRAFT.name), help="train just this one")
    parser.add_argument(
        "--steps-share", type=float, default=1.0, metavar="F", help="a fraction of the steps, to try it"
    )
    args = parser.parse_args()

    tokenizer = train_tokenizer(args.seed)
    for recipe in (MODEL, DRAFT):
        if args.only in (None, recipe.name):
            directory = args.output / recipe.name
            scaled = replace(
                recipe,
                line_steps=round(recipe.line_steps * args.steps_share),
                chat_steps=round(recipe.chat_steps * args.steps_share),
            )
            directory.mkdir(parents=True, exist_ok=True)
            save_tokenizer(tokenizer, directory)
            train(scaled, tokenizer, args.seed, lambda model, to=directory: save_model(model, to))


if __name__ == "__main__":
    main()
