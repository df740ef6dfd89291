"""Runs on every rank of a real launch: many runs of ``LLM`` over one group, results of all of them in one JSON file.

``python golden_driver.py JOB_FILE OUT_FILE``; see ``golden_launches.write_job`` for what a job is. The results are, for each
layout by its name, those of its cases by ``checkpoint/schedule/chunk/scenario``.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.comm.group.failure import end_group_on_uncaught
from labinfer.comm.group.rank_group import RankGroup, join_group
from labinfer.comm.spmd.environment import detect
from labinfer.models.families.layers.router import Router

NUM_SAMPLED = 16
FEW_BLOCKS = {"block_size": 4, "num_kv_blocks": 60, "preemption_mode": "recompute"}
SCENARIOS = {
    "plain": {},
    "hit": {"block_size": 4},
    "recompute": FEW_BLOCKS,
    "swap": FEW_BLOCKS | {"preemption_mode": "swap", "swap_space": 0.002},
    "beams": {"block_size": 4},
}
"""Options of runs in which prompts are found again, sequences are preempted, or beams are searched."""


class LogitsRecorder:
    """Stands before the sampler and keeps each row's logits by (seed, position); seeds number the prompts."""

    def __init__(self, sampler):
        self._sampler = sampler
        self.rows: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, logits_BV, rows):
        for logits_V, row in zip(logits_BV, rows, strict=True):
            self.rows[row.sampling.seed, len(row.token_ids)] = logits_V.to("cpu", copy=True)
        return self._sampler(logits_BV, rows)

    def worst_error(self, prompts: list[list[int]], expected_PTV: torch.Tensor) -> float:
        """Largest |difference| relative to the row's largest |logit|, over all prompts and tokens; forgets the rows."""
        worst = 0.0
        for index, prompt in enumerate(prompts):
            for step, expected_V in enumerate(expected_PTV[index]):
                row_V = self.rows.pop((index, len(prompt) + step))
                worst = max(worst, float((row_V - expected_V).abs().max() / expected_V.abs().max()))
        return worst


class ChoiceRecorder:
    """Notes every token that this rank runs, its position and its experts in ascending order, by layer. The last layer runs only
    those that are asked for."""

    def __init__(self, model: torch.nn.Module):
        self.choices: dict[str, set[tuple[int, ...]]] = {}
        self._left_out: dict[str, set[tuple[int, int]]] = {}
        """Tokens with their positions that a layer did not run, by layer."""
        self._tokens: list[tuple[int, int]] = []
        self._asked: list[int] = []
        self._last = list(model.model.layers)[-1]
        model.register_forward_pre_hook(self._note_tokens)
        for number, layer in model.model.layers.items():
            for router in (module for module in layer.modules() if isinstance(module, Router)):
                self.choices[number], self._left_out[number] = set(), set()
                router.register_forward_hook(
                    lambda module, given, output, number=number: self._note_choices(number, output[0])
                )

    def _note_tokens(self, model, arguments) -> None:
        batch = arguments[0]
        self._tokens = list(zip(batch.token_ids_T.tolist(), batch.positions_T.tolist(), strict=True))
        self._asked = [] if batch.output_rows is None else batch.output_rows.rows_R.tolist()
        # A router is not even called in a batch of prompts' chunks alone: nothing is asked of it.
        if model._ctx.is_last and batch.output_rows is not None and not self._asked and self._last in self._left_out:
            self._left_out[self._last].update(self._tokens)

    def _note_choices(self, number: str, ids_TA: torch.Tensor) -> None:
        tokens = self._tokens
        if len(ids_TA) < len(tokens):
            asked = set(self._asked)  # by rows: another sequence may have an equal token at the same position
            self._left_out[number].update(token for row, token in enumerate(tokens) if row not in asked)
            tokens = [tokens[row] for row in self._asked]
        experts = ids_TA.sort(dim=1).values.tolist()
        self.choices[number].update((*token, *ids) for token, ids in zip(tokens, experts, strict=True))

    def num_wrong(self, expected: dict[str, list[list[int]]]) -> int:
        """Count the choices that are not in ``expected``, and those in there that were not made, but for tokens left out."""
        count = 0
        for number, chosen in self.choices.items():
            right = set(map(tuple, expected[number]))
            count += len(chosen - right) + sum(choice[:2] not in self._left_out[number] for choice in right - chosen)
        return count


def run_case(group: RankGroup, options: dict, scenario: str, job: dict) -> dict:
    """What this rank knows of one run: tokens and counts on rank 0, how far logits are off where tokens are sampled."""
    llm = LLM.from_options(group, EngineOptions.from_flat(options | SCENARIOS[scenario]))
    try:
        return use_llm(llm, group, Path(options["model"]), scenario, job)
    finally:
        llm.unload()
        group.end_splits()  # threads of gloo would otherwise take the cores of the runs that follow


def use_llm(llm: LLM, group: RankGroup, directory: Path, scenario: str, job: dict) -> dict:
    """Answers, logits and counts of one run; see ``run_case``."""
    prompts = job["prompts"]
    if scenario == "beams":
        beams = SamplingParams(ignore_eos=True, n=job["beams"]["num_beams"], **job["beams"])
        outputs = llm.generate(job["beam_prompts"], beams)
        return {"beams": [[c.token_ids for c in o.completions] for o in outputs]} if llm.is_rank0 else {}
    expected = load_file(directory / "reference.safetensors")["logits"]
    runner = llm._parts.worker.runner
    recorder = runner.sampler = LogitsRecorder(runner.sampler)
    choices = ChoiceRecorder(runner.model)
    if (
        choices.choices
    ):  # captured steps come by no hook; tests/unit/worker/test_step_graphs.py compares them with others
        runner._layers._capture = None
    greedy = [SamplingParams(max_tokens=expected.shape[1], ignore_eos=True, seed=i) for i in range(len(prompts))]
    answers, errors = [], []
    for _ in range(2 if scenario == "hit" else 1):
        outputs = llm.generate(prompts, greedy)
        if group.rank == llm.layout.topology.sampling_rank:
            errors.append(recorder.worst_error(prompts, expected))
        if llm.is_rank0:
            answers.append([o.token_ids for o in outputs])
    reference = json.loads((directory / "reference.json").read_text())
    result = {f"wrong choices on rank {group.rank}": choices.num_wrong(reference["choices"])}
    if errors:
        result["logit_error"] = max(errors)
    if llm.is_rank0:
        counts = dict(llm.report.counts)
        result |= {"greedy": answers, "counts": counts, "num_window_blocks": llm.spec.num_window_blocks}
    if scenario == "plain":
        drawn = llm.generate(prompts, [sampled(index) for index in range(len(prompts))])
        if llm.is_rank0:
            result["sampled"] = [o.token_ids for o in drawn]
    return result


def sampled(index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_SAMPLED,
        ignore_eos=True,
        seed=1000 + index,
        temperature=1.5,
        top_p=0.95,
        top_k=200 * (index % 2),
    )


def main() -> None:
    gc.freeze()  # each load of a model collects garbage, but not what was imported
    job, out_file = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    group = join_group(detect(), EngineOptions())
    end_group_on_uncaught(group)
    results = {name: {} for name in job["layouts"]}
    for name, (layout, cases) in job["layouts"].items():
        for checkpoint, schedule, chunk, scenario in cases:
            options = {
                "model": job["checkpoints"][checkpoint],
                "pipeline_schedule": schedule,
                "chunked_prefill_size": chunk,
                "max_num_batched_tokens": max(96, chunk),
            }
            result = run_case(group, options | layout, scenario, job)
            results[name][f"{checkpoint}/{schedule}/{chunk}/{scenario}"] = result
    gathered = group.comm.all_gather_bytes(json.dumps(results).encode())
    if group.rank == 0:
        for other in map(json.loads, gathered):
            for name, cases in other.items():
                for case, result in cases.items():
                    results[name][case] |= result
        out_file.write_text(json.dumps(results))
    group.close()


if __name__ == "__main__":
    main()
