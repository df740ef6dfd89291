"""lm-eval over servers with ``--reproducible``: scores have the same digits for every batch size, on one rank, two tensor-parallel ranks and two stages."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import CORPUS, make_checkpoint
from client_service import DEMO
from serving import Server, serving

lm_eval = pytest.importorskip("lm_eval")
TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager

LAYOUTS = {"one rank": ("single", 1), "tp 2": ("torchrun", 2, "-tp", "2"), "pp 2": ("torchrun", 2, "-pp", "2")}
FORMS = {
    "bfloat16": ("--dtype", "bfloat16"),
    "int4": ("--dtype", "bfloat16", "--quantization", "int4", "--quantization-group-size", "32"),
}
BATCHES = [(1, 1), (8, 1), (64, 1), (1, 8), (1, 64)]
"""Prompts in a request, and requests at once."""
NUM_QUESTIONS = 72
TINY = "qwen2-tied"
TASKS = {
    "scored": "output_type: loglikelihood\nmetric_list:\n  - metric: perplexity\n  - metric: acc\n",
    "greedy": "output_type: generate_until\ngeneration_kwargs: {until: ['~'], max_gen_toks: 12, do_sample: false}\n"
    "metric_list:\n  - metric: exact_match\n",
    "sampled": "output_type: generate_until\n"
    "generation_kwargs: {until: ['~'], max_gen_toks: 12, do_sample: true, temperature: 0.8}\n"
    "metric_list:\n  - metric: exact_match\n",
}
"""Fields of each task that differ."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Tasks over questions and answers of random words, in files of this machine."""
    directory = tmp_path_factory.mktemp("tasks")
    draw, words = random.Random(3), " ".join(CORPUS).split()
    pairs = [
        {
            "question": " ".join(draw.choices(words, k=draw.randrange(2, 30))),
            "answer": " " + " ".join(draw.choices(words, k=4)),
        }
        for _ in range(NUM_QUESTIONS)
    ]
    (directory / "data.jsonl").write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs))
    for name, fields in TASKS.items():
        text = (
            f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {directory}/data.jsonl}}}}\ntest_split: test\n"
        )
        text += "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        (directory / f"{name}.yaml").write_text(f"task: {name}\n{text}{fields}")
    return TaskManager(include_path=str(directory), include_defaults=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints by the name under which they are served."""
    return {"demo": DEMO, "tiny": make_checkpoint(tmp_path_factory.mktemp("tiny"), TINY)}


@contextmanager
def served(models: dict[str, Path], layout: str, *flags: str) -> Iterator[Server]:
    launcher, ranks, *split = LAYOUTS[layout]
    named = [word for name, directory in models.items() for word in ("--model", f"{name}={directory}")]
    with serving(*named, *split, *flags, launcher=launcher, ranks=ranks) as server:
        yield server


def evaluate(server: Server, name: str, directory: Path, tasks, batch: tuple[int, int]) -> dict:
    """All numbers of the results, and every request's log-probability or text."""
    arguments = {
        "model": name,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(directory),
        "num_concurrent": batch[1],
        "tokenized_requests": False,
    }
    found = lm_eval.simple_evaluate(
        "local-completions",
        model_args=arguments,
        tasks=list(TASKS),
        batch_size=batch[0],
        task_manager=tasks,
        bootstrap_iters=0,
    )
    replies = {
        task: {sample["doc_id"]: sample["resps"] for sample in samples} for task, samples in found["samples"].items()
    }
    assert {len(each) for each in replies.values()} == {NUM_QUESTIONS}
    return {"scores": found["results"], "replies": replies}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_scores_have_the_same_digits_in_every_batch_and_on_every_layout(models, tasks, form):
    expected: dict[str, dict] = {}
    for layout in LAYOUTS:
        with served(models, layout, *FORMS[form], "--reproducible") as server:
            for name, directory in models.items():
                for batch in BATCHES:
                    found = evaluate(server, name, directory, tasks, batch)
                    assert found == expected.setdefault(name, found), (layout, name, batch)
    assert expected["demo"]["scores"] != expected["tiny"]["scores"]


@pytest.mark.slow
def test_scores_without_the_option_differ(models, tasks):
    """The control: what is compared above differs where sums depend on the layout."""
    tiny = {"tiny": models["tiny"]}
    with served(tiny, "one rank", *FORMS["bfloat16"], "--reproducible") as server:
        expected = evaluate(server, "tiny", models["tiny"], tasks, (1, 1))
    with served(tiny, "tp 2", *FORMS["bfloat16"]) as server:
        assert evaluate(server, "tiny", models["tiny"], tasks, (8, 1)) != expected
