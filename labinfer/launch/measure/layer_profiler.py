"""LayerProfiler: times dummy steps of a model runner, repeated until the measurement is stable."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.plan import BatchEntry, BatchPlan, CacheMove, Command, SequenceStart, TokenSampling
from labinfer.comm import wire
from labinfer.comm.communicator import Communicator
from labinfer.launch.measure.quota_timer import QuotaTimer
from labinfer.models.layers.input_batch import ModelInputBatch
from labinfer.planner.step_shape import StepShape
from labinfer.worker.model_runner import ModelRunner

BATCH_SECONDS = 0.06
"""Minimum duration in seconds of a batch of repetitions, which are timed together."""
MAX_STEPS = 200
"""Maximum number of repetitions of a step in a batch of repetitions."""
NUM_BATCHES = 3
"""Number of timed batches of repetitions. Their median counts: the minimum would be below the time of a step in a run."""
INPUT_STEPS = 5
"""Number of timed repetitions of preparing inputs. The layers run before each one and evict the inputs from the CPU
caches, as in a run."""
SLOW_SECONDS = 0.3
"""Steps that take longer than this run only twice, and both times count (see ``MAX_FIRST_RATIO``)."""
MAX_FIRST_RATIO = 1.05
"""For slow steps: if the first run takes more than this multiple of the second, it counts as a warm-up, and a third run
replaces it."""

_decode_command = msgspec.msgpack.Decoder(Command)


@dataclass(frozen=True, kw_only=True)
class LayerProfiler:
    """Runs plans on this rank's part of the model, together with the ranks of its stage.

    Args:
        comm: communicator of the ranks of the stage.
        sum_ranks: takes a row-parallel layer's partial result, and writes to it the sum over the ranks as the layer does.
        sizes: sizes of the KV cache. Sequences share blocks if there are too few.
        vocab_size: number of token ids.
        quota_timer: timer that accounts for this rank's CPU quota.
    """

    comm: Communicator
    sum_ranks: Callable[[torch.Tensor], torch.Tensor]
    runner: ModelRunner
    device: torch.device
    sizes: CacheSizes
    vocab_size: int
    quota_timer: QuotaTimer = field(default_factory=QuotaTimer)

    def plan(self, shape: StepShape) -> BatchPlan:
        """Plan of decodes of equal context length, or of one chunk."""
        if shape.chunks:
            return self.chunk(*shape.chunks[0])
        return self.decodes(shape.num_decodes, shape.decode_context // shape.num_decodes)

    def decodes(self, count: int, context: int) -> BatchPlan:
        """Plan of ``count`` decodes, each with a context of ``context`` tokens."""
        each = self.runner.cache.blocks_for(context)
        tables = [[(i * each + j) % self.sizes.num_blocks for j in range(each)] for i in range(count)]
        tokens = [[(7 + 31 * i + 13 * j) % self.vocab_size for j in range(context)] for i in range(count)]
        return self._plan(tokens, tables, num_tokens=1)

    def chunk(self, num_tokens: int, before: int) -> BatchPlan:
        """Plan of a prefill chunk of ``num_tokens`` tokens that also attends to ``before`` earlier tokens."""
        count = self.runner.cache.blocks_for(before + num_tokens)
        blocks = [block % self.sizes.num_blocks for block in range(count)]
        tokens = [(7 + 31 * i) % self.vocab_size for i in range(before + num_tokens)]
        return self._plan([tokens], [blocks], num_tokens=num_tokens)

    def _plan(self, tokens: Sequence[list[int]], tables: Sequence[list[int]], *, num_tokens: int) -> BatchPlan:
        sampling = TokenSampling(num_prompt_tokens=1)
        slots = max(1, self.sizes.num_states)
        return BatchPlan(
            step_id=0,
            starts=[SequenceStart(i, ids, sampling, state_slot=i % slots) for i, ids in enumerate(tokens)],
            finished=[],
            moves=[],
            entries=[
                BatchEntry(
                    seq_id=i,
                    num_tokens=num_tokens,
                    begin=len(ids) - num_tokens,
                    position=len(ids) - num_tokens,
                    first_block=0,
                    new_blocks=table,
                    num_samples=1,
                )
                for i, (ids, table) in enumerate(zip(tokens, tables, strict=True))
            ],
        )

    def fill_cache(self, num_tokens: int) -> None:
        """Run a prompt and copy its keys and values to all blocks: uninitialized memory may contain NaN."""
        num_blocks = self.runner.cache.blocks_for(num_tokens)
        plan = self.chunk(num_tokens, 0)
        batch = self.runner.prepare(plan)
        self._run(self.runner, plan, batch)
        dest = list(range(num_blocks, self.sizes.num_blocks))
        copies = CacheMove("copy", [block % num_blocks for block in dest], dest)
        self._run(self.runner, msgspec.structs.replace(plan, moves=[copies] if dest else []), batch)
        self._forget(plan)

    def time_layers(self, plan: BatchPlan, runner: ModelRunner, all_rows: bool = True) -> float:
        """Seconds that a step spends in the embedding and the layers.

        Args:
            runner: model runner with some of the layers.
            all_rows: whether the last layer computes all rows, not only the sampled ones.
        """
        batch = self.runner.prepare(plan, all_rows=all_rows)
        seconds = self._time(lambda: self._run(runner, plan, batch))
        self._forget(plan)
        return seconds

    def time_inputs(self, plan: BatchPlan) -> float:
        """Seconds to prepare the inputs of a step."""
        self.runner.prepare(plan)
        later = self._later(plan)
        seconds, batch = [], []
        for _ in range(INPUT_STEPS):
            batch.clear()
            seconds.append(self.quota_timer.time(lambda: batch.append(self.runner.prepare(later))))
            self._run(self.runner, later, batch[0])
        self._forget(plan)
        return statistics.median(seconds)

    def time_plan(self, plan: BatchPlan) -> tuple[float, float]:
        """Seconds to serialize the plan of a step, and to deserialize it."""
        batch = self.runner.prepare(plan)
        later = self._later(plan)
        parts = wire.pack(later)
        encode, decode = [], []
        for _ in range(INPUT_STEPS):
            encode.append(self.quota_timer.time(lambda: wire.pack(later)))
            self._run(self.runner, plan, batch)
            decode.append(self.quota_timer.time(lambda: wire.unpack(parts, _decode_command)))
            self._run(self.runner, plan, batch)
        self._forget(plan)
        return statistics.median(encode), statistics.median(decode)

    def time_head(self, plan: BatchPlan) -> float:
        """Seconds of the LM head and sampling of a step."""
        batch = self.runner.prepare(plan)
        hidden_TD = self.runner.run(plan, batch, None).clone()
        seconds = self._time(lambda: self.runner.sample(plan, batch, hidden_TD))
        self._forget(plan)
        return seconds

    def time_embedding(self, plan: BatchPlan) -> float:
        """Seconds of the embedding lookup of a step."""
        batch = self.runner.prepare(plan)
        with torch.inference_mode():
            seconds = self._time(lambda: self.runner.model.model.embed_tokens(batch.token_ids_T))
        self._forget(plan)
        return seconds

    def time_layer_inputs(self, plan: BatchPlan) -> float:
        """Seconds to compute Gemma's per-layer embeddings of a step on this stage; 0 without them."""
        decoder = self.runner.model
        if (layer_inputs := getattr(decoder.model, "layer_inputs", None)) is None:
            return 0.0
        batch = self.runner.prepare(plan)
        with torch.inference_mode():
            embedded_TD = decoder.model.embed_tokens(batch.token_ids_T)
            seconds = self._time(lambda: layer_inputs(batch.token_ids_T, embedded_TD))
        self._forget(plan)
        return seconds

    def time_sum(self, num_rows: int, width: int, dtype: torch.dtype) -> float:
        """Seconds of a row-parallel layer's sum over the ranks of the stage."""
        partial_TD = torch.zeros(num_rows, width, dtype=dtype, device=self.device)
        return self._time(lambda: self.sum_ranks(partial_TD).flatten()[:1].tolist())

    def _run(self, runner: ModelRunner, plan: BatchPlan, batch: ModelInputBatch) -> None:
        hidden_TD = runner.run(plan, batch, None)
        hidden_TD.flatten()[:1].tolist()  # synchronizes an accelerator

    def _later(self, plan: BatchPlan) -> BatchPlan:
        """The plan of the next step with the work of ``plan``, for sequences that the runner already knows, as in most
        steps."""
        entries = [
            msgspec.structs.replace(
                entry, first_block=len(entry.new_blocks), new_blocks=[], new_tokens=(plan.starts[i].token_ids[-1],)
            )
            for i, entry in enumerate(plan.entries)
        ]
        return msgspec.structs.replace(plan, starts=[], entries=entries)

    def _forget(self, plan: BatchPlan) -> None:
        self.runner.forget([start.seq_id for start in plan.starts])

    def _time(self, step: Callable[[], object]) -> float:
        """Seconds of a step: the median of the means of ``NUM_BATCHES`` batches of repetitions; for a slow step the mean of two runs."""
        first = self._time_batch(step, 1)  # warm-up: small steps are captured
        estimate = self._time_batch(step, 1)
        slowest = torch.tensor([first, estimate])
        if self.comm.size > 1:  # all ranks of the stage run the same number of repetitions
            slowest = torch.stack(self.comm.all_gather(slowest)).amax(0)
        first_slowest, slowest_estimate = slowest.tolist()
        if slowest_estimate > SLOW_SECONDS:
            first_counts = first_slowest <= MAX_FIRST_RATIO * slowest_estimate
            return statistics.mean((estimate, first if first_counts else self._time_batch(step, 1)))
        count = min(MAX_STEPS, max(1, round(BATCH_SECONDS / slowest_estimate)))
        batches = [estimate] if count == 1 else []
        while len(batches) < NUM_BATCHES:
            batches.append(self._time_batch(step, count))
        return statistics.median(batches)

    def _time_batch(self, step: Callable[[], object], count: int) -> float:
        def repeat() -> None:
            for _ in range(count):
                step()

        return self.quota_timer.time(repeat) / count
