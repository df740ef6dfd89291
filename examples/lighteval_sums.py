"""A lighteval task with the questions in lm_eval/sums.jsonl; docs/evaluate.md has the command."""

from __future__ import annotations

from pathlib import Path

from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc


def prompt(line: dict, task_name: str) -> Doc:
    return Doc(task_name=task_name, query=line["question"], choices=[line["answer"]], gold_index=0)


TASKS_TABLE = [
    LightevalTaskConfig(
        name="labinfer_sums",
        prompt_function=prompt,
        hf_repo=str(Path(__file__).parent / "lm_eval"),
        hf_subset="default",
        hf_avail_splits=["train"],
        evaluation_splits=["train"],
        metrics=[Metrics.exact_match],
        generation_size=16,
        stop_sequence=["\n"],
    )
]
