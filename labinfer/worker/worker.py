"""Worker: the loop of every rank: take a plan, receive activations, run the layers, send the outputs on."""

from __future__ import annotations

import time
from collections import Counter, deque

import torch

from labinfer.base.plan import BatchPlan, BatchResult
from labinfer.base.tracer import Tracer
from labinfer.comm.pipeline import Arrival, PipelineCommunicator
from labinfer.comm.progress import Progress
from labinfer.models.layers.input_batch import ModelInputBatch
from labinfer.worker.model_runner import ModelRunner
from labinfer.worker.step_sink import StepRecord, StepSinks


class Worker:
    """Runs one rank's part of every step.

    ``launch`` posts the receives of a plan, ``progress`` runs the oldest launched plan, ``stop`` waits for all sends.

    Args:
        pipeline: links to the previous and the next stage; None if there is one stage.
        incoming: dtype of the activations that arrive; None on the first stage.
        hidden_size: width of the activations between stages.
        recorder: traces this rank's time.
        sinks: receive every step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pipeline: PipelineCommunicator | None,
        progress: Progress,
        *,
        device: torch.device,
        incoming: torch.dtype | None,
        hidden_size: int,
        is_last: bool,
        is_sampling_rank: bool,
        recorder: Tracer,
        sinks: StepSinks,
    ):
        self.runner = runner
        self._pipeline = pipeline
        self._progress = progress
        self._device, self._incoming, self._hidden_size = device, incoming, hidden_size
        self._is_last, self._is_sampling_rank = is_last, is_sampling_rank
        self._recorder, self._sinks = recorder, sinks
        self.is_first = incoming is None
        """Whether this rank is on the first stage, which receives no activations."""
        self._launched: deque[tuple[BatchPlan, Arrival | None]] = deque()
        self.num_steps = 0
        self.busy_time = 0.0
        """Seconds spent preparing, running and sampling steps."""
        self.layer_time = 0.0
        """Part of ``busy_time`` in the layers, the embedding included."""
        self.waits: Counter[str] = Counter()
        """Seconds of waits by kind; see ``WorkerStats.waits``."""

    def launch(self, plan: BatchPlan) -> None:
        """Post the receive of the plan's activations, and enqueue the plan."""
        self._launched.append((plan, self.post(plan.step_id, plan.num_tokens)))

    def progress(self) -> BatchResult | None:
        """Run this rank's part of the oldest plan that was launched but not run yet.

        Returns the plan's result if this is rank 0 and it samples; otherwise None.
        """
        plan, arrival = self._launched.popleft()
        self._progress.step_id = plan.step_id
        if not self._sinks:
            return self._run(plan, arrival)
        before = self.busy_time, self.layer_time, self.waits["activations"]
        result = self._run(plan, arrival)
        self._sinks.write(
            StepRecord(
                step_id=plan.step_id,
                num_sequences=len(plan.entries),
                num_tokens=plan.num_tokens,
                num_decodes=plan.num_decodes,
                time=time.time(),
                busy=self.busy_time - before[0],
                layers=self.layer_time - before[1],
                waited=self.waits["activations"] - before[2],
            )
        )
        return result

    def _run(self, plan: BatchPlan, arrival: Arrival | None) -> BatchResult | None:
        with self._recorder.slice("step", plan):
            batch, hidden_TD = self.run_layers(plan, arrival)
            result = self.sample(plan, batch, hidden_TD) if self._is_last else None
            self.num_steps += 1
            if self._is_last and not self._is_sampling_rank:
                return None
            if self._pipeline is None or (self._is_last and not self._pipeline.results_travel):
                return result
            with self._recorder.slice("send", plan):
                if self._is_last:
                    self._pipeline.send_result(plan.step_id, result.encode(), plan.result_bytes)
                else:
                    self._pipeline.send_activations(plan.step_id, hidden_TD)
        return None

    # The parts of a step, in order; measurements run them one by one.

    def post(self, step_id: int, num_tokens: int) -> Arrival | None:
        """Post the receive of a step's activations; None on the first stage, which receives none."""
        if self._incoming is None:
            return None
        return self._pipeline.post_activations(step_id, num_tokens, self._hidden_size, self._incoming, self._device)

    def run_layers(
        self, plan: BatchPlan, arrival: Arrival | None, all_rows: bool = False
    ) -> tuple[ModelInputBatch, torch.Tensor]:
        """Build a step's inputs while its activations arrive, then run this stage's layers on them.

        Args:
            all_rows: see ``ModelRunner.prepare``.
        """
        begin = time.perf_counter()
        with self._recorder.slice("prepare", plan):
            batch = self.runner.prepare(plan, all_rows)
        prepared = time.perf_counter()
        self.busy_time += prepared - begin
        hidden_TD = None
        if arrival is not None:
            with self._recorder.slice("wait for activations", plan):
                hidden_TD = arrival.wait()
            self.waits["activations"] += time.perf_counter() - prepared
        begin = time.perf_counter()
        with self._recorder.slice("run", plan):
            hidden_TD = self.runner.run(plan, batch, hidden_TD)
        seconds = time.perf_counter() - begin
        self.busy_time += seconds
        self.layer_time += seconds
        return batch, hidden_TD

    def sample(self, plan: BatchPlan, batch: ModelInputBatch, hidden_TD: torch.Tensor) -> BatchResult | None:
        """Sample on the last stage. Returns the step's result; None on ranks that do not sample."""
        begin = time.perf_counter()
        with self._recorder.slice("sample", plan):
            result = self.runner.sample(plan, batch, hidden_TD)
        self.busy_time += time.perf_counter() - begin
        return result

    def stop(self) -> None:
        """Wait until all sends of this rank have completed."""
        if self._pipeline is not None:
            self._pipeline.drain()

    def close(self) -> None:
        """Release the model and its KV cache, and close the sinks."""
        self.runner = None
        self._sinks.close()

    def expert_tokens(self) -> dict[int, list[int]]:
        """Tokens routed to each expert so far, by layer. Empty except on a stage's first tp rank, and after ``close``.
        May be called by another thread."""
        runner = self.runner
        loads = runner.model.expert_loads() if runner is not None else {}
        return {layer: num_tokens_E.tolist() for layer, num_tokens_E in loads.items()}

    def reset_counters(self) -> None:
        """Reset the counters of steps, seconds and experts' tokens."""
        self.num_steps, self.busy_time, self.layer_time = 0, 0.0, 0.0
        self.waits.clear()
        for num_tokens_E in self.runner.model.expert_loads().values():
            num_tokens_E.zero_()
