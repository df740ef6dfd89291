"""run_texts: runs given texts through a loaded model on all its ranks, without sampling, to compare the predictions with the
texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from labinfer.base.plan import BatchEntry, BatchPlan, SequenceStart, TokenSampling
from labinfer.cli.bench.divergence import compare
from labinfer.comm.group.rank_group import RankGroup
from labinfer.launch.rank_runtime import RankRuntime

STEP_TOKENS = 512
"""Maximum tokens of a step with several texts. A text with more tokens is a step of its own."""
LOGITS_ROWS = 64
"""Number of tokens whose logits are computed at a time: a float64 row of a large vocabulary takes more than 1 MB."""

Text = Sequence[int]
"""Token ids of a text."""


@dataclass(frozen=True)
class TextBatches:
    """Texts, grouped into steps of up to ``STEP_TOKENS`` tokens."""

    steps: list[list[Text]]
    block_size: int

    @classmethod
    def split(cls, texts: Sequence[Text], block_size: int) -> TextBatches:
        steps: list[list[Text]] = []
        room = 0
        for text in texts:
            if not steps or len(text) > room:
                steps.append([])
                room = STEP_TOKENS
            steps[-1].append(text)
            room -= len(text)
        return cls(steps, block_size)

    @property
    def num_blocks(self) -> int:
        """KV blocks that the largest step needs."""
        return max(sum(self._num_blocks(text) for text in step) for step in self.steps)

    def plans(self) -> Iterator[BatchPlan]:
        """Yield the plan of each step. Every text is a sequence; all steps use the same KV blocks."""
        sampling = TokenSampling(num_prompt_tokens=1)
        for step_id, step in enumerate(self.steps):
            starts, entries, first = [], [], 0
            for seq_id, text in enumerate(step):
                end = first + self._num_blocks(text)
                starts.append(SequenceStart(seq_id, list(text), sampling, state_slot=seq_id))
                entries.append(
                    BatchEntry(
                        seq_id=seq_id,
                        num_tokens=len(text),
                        begin=0,
                        position=0,
                        first_block=0,
                        new_blocks=list(range(first, end)),
                    )
                )
                first = end
            yield BatchPlan(step_id=step_id, starts=starts, finished=[], moves=[], entries=entries)

    def predictions(self) -> Iterator[tuple[list[int], list[int]]]:
        """For each step, yield the indices of tokens that are not the last of their text, and the ids of the tokens that follow
        them."""
        for step in self.steps:
            rows, next_ids, first = [], [], 0
            for text in step:
                rows += range(first, first + len(text) - 1)
                next_ids += text[1:]
                first += len(text)
            yield rows, next_ids

    def _num_blocks(self, text: Text) -> int:
        return -(-len(text) // self.block_size)


def run_texts(group: RankGroup, parts: RankRuntime, steps: TextBatches) -> list[torch.Tensor]:
    """Run all steps. On ranks of the last stage, returns the final hidden states of each step, (T, D); on other ranks, an empty
    list. Collective."""
    worker, is_last = parts.worker, parts.layout.topology.is_last(parts.place.stage)
    states = []
    with group.progress.without_limit():  # no timeout: a stage may be much slower than the one before
        for plan in steps.plans():
            _, hidden_TD = worker.run_layers(plan, worker.post(plan.step_id, plan.num_tokens), all_rows=True)
            worker.runner.forget([entry.seq_id for entry in plan.entries])
            if is_last:
                states.append(hidden_TD.clone())  # a copy, as the next step may overwrite the memory
            else:
                parts.pipeline.send_activations(plan.step_id, hidden_TD)
        worker.stop()
    return states


@torch.inference_mode()
def compare_runs(
    steps: TextBatches,
    reference: RankRuntime,
    reference_states: list[torch.Tensor],
    parts: RankRuntime,
    states: list[torch.Tensor],
) -> torch.Tensor | None:
    """Compare two runs by ``divergence.compare``, for every token but the first of each text: (tokens, 4).

    Collective over the ranks that have hidden states. The first of these ranks returns the result, all others None.
    """
    if not states:
        return None
    parts_N4 = []
    for (rows, next_ids), exact_TD, ours_TD in zip(steps.predictions(), reference_states, states, strict=True):
        for begin in range(0, len(rows), LOGITS_ROWS):
            part = slice(begin, begin + LOGITS_ROWS)
            exact_BV = reference.worker.runner.model.logits(exact_TD[rows[part]])
            ours_BV = parts.worker.runner.model.logits(ours_TD[rows[part]])
            if exact_BV is not None:
                parts_N4.append(compare(exact_BV, ours_BV, torch.tensor(next_ids[part], device=exact_BV.device)))
    return torch.cat(parts_N4) if parts_N4 else None
