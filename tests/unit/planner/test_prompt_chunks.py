"""Chunks that a plan is priced with, against those of the scheduler itself."""

from __future__ import annotations

import statistics
from collections import defaultdict

import pytest
from simulated import GivenTimes, equal_steps, make_model

from labinfer.base.config import SchedulerOptions
from labinfer.base.plan import BatchPlan
from labinfer.base.sampling_params import SamplingParams
from labinfer.planner.objective import EngineLimits, make_criteria
from labinfer.planner.prompt_chunks import prompt_chunks
from labinfer.planner.workload import MeanRequest, RequestLengths, Workload
from labinfer.requests.prompts import TokensPrompt

LIMITS = SchedulerOptions()


def scheduled_chunks(num_requests: int, prompt: int, output: int, num_stages: int, **scheduling) -> list[list[int]]:
    """Tokens of the chunks of each request, as the scheduler made them."""
    source, chunks = equal_steps(*[0.01] * num_stages), defaultdict(list)

    def times(plan: BatchPlan):
        for entry in plan.entries:
            if not entry.is_decode or entry.num_tokens > 1 or entry.position < prompt:
                chunks[entry.seq_id].append(entry.num_tokens)
        return source.times(plan)

    model = make_model(GivenTimes(times), num_stages, **scheduling)
    requests = [
        model.make_request(
            key, TokensPrompt([key] * prompt), SamplingParams(max_tokens=output + 17 * key % 40, ignore_eos=True)
        )
        for key in range(num_requests)
    ]
    assert len(list(model.run(requests))) == num_requests
    return [chunks[key] for key in sorted(chunks)]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("prompt", [100, 512, 3000])
def test_prompt_alone_is_cut_as_the_scheduler_does(num_stages, prompt):
    expected = prompt_chunks(
        prompt, LIMITS, num_stages=num_stages, num_batches=num_stages, num_decodes=0, others_wait=False
    )
    assert scheduled_chunks(1, prompt, 4, num_stages) == [expected]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_prompts_that_have_waited_are_cut_as_the_scheduler_does(num_stages):
    expected = prompt_chunks(
        700, LIMITS, num_stages=num_stages, num_batches=num_stages, num_decodes=7 / num_stages, others_wait=True
    )
    steady = scheduled_chunks(32, 700, 40, num_stages, max_num_seqs=8)[8:20]
    assert statistics.median(map(len, steady)) == len(expected)
    assert statistics.median(chunks[0] for chunks in steady) == pytest.approx(expected[0], abs=8)


def test_little_room_beside_decodes_is_shared_out_evenly():
    chunks = prompt_chunks(1000, LIMITS, num_stages=2, num_batches=2, num_decodes=412, others_wait=True)
    assert chunks == [100.0] * 10


@pytest.mark.parametrize("num_stages", [1, 4])
@pytest.mark.parametrize(("prompt", "output"), [(512, 128), (100, 2), (3000, 10), (3000, 400), (1, 1)])
def test_steps_bring_in_as_many_prompts_as_end(prompt, output, num_stages):
    request = Workload((RequestLengths(prompt=prompt, output=output),)).mean
    for criterion in make_criteria("throughput", request, EngineLimits(max_model_len=4096), num_stages):
        decodes = sum(weight * shape.num_decodes for weight, shape in criterion.path)
        tokens = sum(weight * sum(size for size, _ in shape.chunks) for weight, shape in criterion.path)
        seen = sum(weight * sum(n * (before + n / 2) for n, before in shape.chunks) for weight, shape in criterion.path)
        samples = sum(weight * (shape.num_samples - shape.num_decodes) for weight, shape in criterion.path)
        assert sum(weight for weight, _ in criterion.path) == pytest.approx(1)
        assert tokens / decodes == pytest.approx(prompt / output)
        assert samples / decodes == pytest.approx(1 / output)
        assert seen / tokens == pytest.approx(prompt / 2, rel=0.01)
        assert max(shape.rows for _, shape in criterion.path) <= 512 + 1e-6


def test_longer_prompts_among_short_ones_are_counted_by_what_their_tokens_see():
    request = MeanRequest(prompt=100, output=10, decode_context=300, prompt_context=200)
    for criterion in make_criteria("throughput", request, EngineLimits(max_model_len=4096), 2):
        seen = sum(weight * sum(n * (before + n / 2) for n, before in shape.chunks) for weight, shape in criterion.path)
        tokens = sum(weight * sum(size for size, _ in shape.chunks) for weight, shape in criterion.path)
        assert seen / tokens == pytest.approx(200, rel=0.01)
