"""The loop every rank runs: take a plan, receive activations, run the layers, send them on."""

from __future__ import annotations

import time
from collections import deque

import torch

from labinfer.comm.pipeline import Arrival, PipelineCommunicator
from labinfer.comm.progress import Progress
from labinfer.observe.recorder import Recorder
from labinfer.plan import BatchPlan, BatchResult
from labinfer.worker.model_runner import ModelRunner


class Worker:
    """One rank's part in every step.

    ``launch`` posts what a plan needs, ``progress`` runs the oldest launched plan, ``stop`` lets everything sent arrive.

    Args:
        pipeline: links to the stages beside this one; None when there is one stage.
        incoming: number type of the activations that arrive; None on the first stage.
        hidden_size: their width.
        recorder: of where the time goes.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pipeline: PipelineCommunicator | None,
        progress: Progress,
        device: torch.device,
        incoming: torch.dtype | None,
        hidden_size: int,
        is_last: bool,
        is_sampling_rank: bool,
        recorder: Recorder,
    ):
        self.runner = runner
        self._pipeline = pipeline
        self._progress = progress
        self._device, self._incoming, self._hidden_size = device, incoming, hidden_size
        self._is_last, self._is_sampling_rank = is_last, is_sampling_rank
        self._recorder = recorder
        self._launched: deque[tuple[BatchPlan, Arrival | None]] = deque()
        self.num_steps = 0
        self.busy_time = 0.0

    def launch(self, plan: BatchPlan) -> None:
        """Make room for the plan's activations and queue it."""
        arrival = None
        if self._incoming is not None:
            arrival = self._pipeline.post_activations(
                plan.step_id, plan.num_tokens, self._hidden_size, self._incoming, self._device
            )
        self._launched.append((plan, arrival))

    def progress(self) -> BatchResult | None:
        """Run the oldest launched plan; the sampled tokens where they are made and there is one stage only."""
        plan, arrival = self._launched.popleft()
        self._progress.step_id = plan.step_id
        with self._recorder.slice("step", plan):
            return self._step(plan, arrival)

    def _step(self, plan: BatchPlan, arrival: Arrival | None) -> BatchResult | None:
        slice_of, result = self._recorder.slice, None
        begin = time.perf_counter()
        with slice_of("prepare", plan):
            batch = self.runner.prepare(plan)  # while the activations are on their way
        self.busy_time += time.perf_counter() - begin
        hidden_TD = None
        if arrival is not None:
            with slice_of("wait for activations", plan):
                hidden_TD = arrival.wait()
        begin = time.perf_counter()
        with slice_of("run", plan):
            hidden_TD = self.runner.run(plan, batch, hidden_TD)
        if self._is_last:
            with slice_of("sample", plan):
                result = self.runner.sample(plan, batch, hidden_TD)
        self.busy_time += time.perf_counter() - begin
        self.num_steps += 1
        if self._is_last and self._pipeline is None:
            return result if self._is_sampling_rank else None
        with slice_of("send", plan):
            if not self._is_last:
                self._pipeline.send_activations(plan.step_id, hidden_TD)
            elif self._is_sampling_rank:
                self._pipeline.send_tokens(plan.step_id, result.token_ids, result.values)
        return None

    def stop(self) -> None:
        """Wait until everything this rank sent has arrived."""
        if self._pipeline is not None:
            self._pipeline.drain()

    def reset_times(self) -> None:
        """Count steps and busy seconds from 0 again."""
        self.num_steps, self.busy_time = 0, 0.0
