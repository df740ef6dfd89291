"""Steps that are timed before the first request are like those of requests, also for mixtures and for layers with states."""

from __future__ import annotations

from dataclasses import replace

import torch
from checkpoints import make_checkpoint

from labinfer import LLM
from labinfer.launch.measure.startup_profiler import DummyActivations, StartupProfiler


class RecordingWorker:
    """Keeps the plans that it hands on."""

    def __init__(self, worker):
        self._worker, self.plans = worker, []

    def run_layers(self, plan, arrival, all_rows=False):
        self.plans.append(plan)
        return self._worker.run_layers(plan, arrival, all_rows)

    def __getattr__(self, name):
        return getattr(self._worker, name)


def test_sequences_of_a_timed_step_have_experts_and_states_of_their_own(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "qwen3.5-moe")
    with LLM(str(directory), num_kv_blocks=64, preemption_mode="swap", max_num_seqs=8) as llm:
        parts = llm._parts
        worker = RecordingWorker(parts.worker)
        meter = StartupProfiler(parts.layout, parts.place, worker, None)
        times = meter.measure(llm.group, llm.options.scheduler, parts.capacity.sizes)
        assert times.sizes == [1, 8]
        assert times.swapped_block > 0 and times.swapped_state > 0
        for plan in worker.plans:
            assert sorted(start.state_slot for start in plan.starts) == list(range(len(plan.entries)))
            assert len({start.token_ids[0] for start in plan.starts}) == len(plan.entries)
        assert all(min(tokens) > 0 for tokens in worker.expert_tokens().values()), "some experts were never read"
        few = meter.measure(llm.group, llm.options.scheduler, replace(parts.capacity.sizes, num_states=7))
        assert few.sizes == [1], "eight sequences have no slots"
        for number in range(3):
            (first, second) = meter._hidden(2, number), meter._hidden(2, number)
            assert torch.equal(first, second), "ranks of a stage would choose different experts"
            assert not torch.equal(first[0], first[1])
            assert DummyActivations(first).wait() is first
