"""StartupProfiler: measures, before the first request, seconds of steps by batch size, of sends between stages, and of
swaps."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass

import msgspec
import torch

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.config import SchedulerOptions
from labinfer.base.plan import (
    BatchEntry,
    BatchPlan,
    BatchResult,
    CacheMove,
    EntryResult,
    MoveKind,
    SequenceStart,
    TokenSampling,
)
from labinfer.base.rank_stats import StepTimes
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.pipeline import PipelineCommunicator
from labinfer.comm.spmd.devices import torch_device
from labinfer.comm.spmd.topology import Place
from labinfer.launch.layout.layout import Layout
from labinfer.worker.kv_cache import KVCacheManager
from labinfer.worker.worker import Worker

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 8, 64)
"""Batch sizes of timed decode steps."""
DRAFT_ROWS = (1, 2, 4, 8, 16)
"""Rows of one sequence in steps that verify drafts: the sampled token and 0 to 15 drafted ones."""
DRAFT_ROUNDS = 5
"""Repetitions of a timed step with drafts. Steps are captured from the third repetition on."""
ROUNDS = 3
"""Number of times that each step without drafts is timed. The fastest run counts, because other load may slow the rest down."""
RING_BYTES = BatchResult.max_bytes(1) + EntryResult.max_bytes(num_samples=1)


@dataclass(frozen=True)
class DummyActivations:
    """Stand-in for the activations that the previous stage would send; see ``comm.pipeline.Arrival``."""

    hidden_TD: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.hidden_TD


@dataclass(frozen=True)
class StartupProfiler:
    """Runs steps of dummy sequences through this rank's part of the model.

    The sequences differ as those of requests do: tokens select different experts, and each sequence has its own state.
    """

    layout: Layout
    place: Place
    worker: Worker
    pipeline: PipelineCommunicator | None

    @property
    def cache(self) -> KVCacheManager:
        """KV cache of the model; its contents may be overwritten."""
        return self.worker.runner.cache

    def is_needed(self, options: SchedulerOptions, cache_sizes: CacheSizes) -> bool:
        """Whether the scheduler uses measured times: to choose drafts, the micro-batches in flight, or between swapping and recomputing."""
        chooses_inflight = self.pipeline is not None and not options.max_inflight
        return options.chooses_drafts or chooses_inflight or cache_sizes.num_host_blocks > 0

    def measure(self, group: RankGroup, options: SchedulerOptions, cache_sizes: CacheSizes) -> StepTimes:
        """Time steps, transfers between stages, and swaps, and gather the times of all ranks; collective."""
        most = min(options.max_num_seqs, options.max_num_batched_tokens, cache_sizes.num_states or options.max_num_seqs)
        sizes = [size for size in BATCH_SIZES if size <= most]
        room = min(
            options.chunked_prefill_size,
            options.max_num_batched_tokens,
            cache_sizes.max_model_len // (2 if self.layout.config.mtp is not None else 1),
        )
        rows = []
        if options.chooses_drafts:
            most_rows = min(room, 1 + options.speculative_config.max_tokens)
            rows = [count for count in DRAFT_ROWS if count <= most_rows]
        drafts = [
            min(self._time_with_others(group, 1, number, count) for number in range(DRAFT_ROUNDS)) for count in rows
        ]
        mine = [min(self._time_with_others(group, size, number) for number in range(ROUNDS)) for size in sizes]
        alone: list[float] = []
        for stage in range(self.layout.topology.num_stages):
            group.comm.barrier()  # ranks of other stages wait at the next barrier
            if stage == self.place.stage and self.pipeline is not None:
                alone = [min(self._time_step(size, number) for number in range(ROUNDS)) for size in sizes]
        group.comm.barrier()
        swaps = [
            self._time_swap("swap_out", "swap_in") if cache_sizes.num_host_blocks else 0.0,
            self._time_swap("swap_out_window", "swap_in_window") if cache_sizes.num_host_window_blocks else 0.0,
            self._time_swap("swap_out_state", "swap_in_state") if cache_sizes.num_host_states else 0.0,
        ]
        hop = 0.0
        if self.pipeline is not None:
            rings = [self._time_ring(group, number) for number in range(2 * ROUNDS)]
            hop = statistics.median(rings) / (self.layout.topology.num_stages - (not self.pipeline.results_travel))
        of_rank = {
            rank: msgspec.msgpack.decode(data, type=tuple[list[float], list[float], list[float], float, list[float]])
            for rank, data in group.gather_bytes(msgspec.msgpack.encode((mine, alone, drafts, hop, swaps))).items()
        }
        topology = self.layout.topology
        together, alone_by_stage, drafts_by_stage = (
            [
                [
                    max(times)
                    for times in zip(*(of_rank[rank][kind] for rank in topology.stage_ranks(stage)), strict=True)
                ]
                for stage in range(topology.num_stages)
            ]
            for kind in (0, 1, 2)
        )
        swapped_block, swapped_window_block, swapped_state = (
            max(times) for times in zip(*(swaps for *_, swaps in of_rank.values()), strict=True)
        )
        logger.debug("steps are measured")
        return StepTimes(
            sizes=sizes,
            by_stage=together,
            alone=alone_by_stage if any(alone_by_stage) else [],
            hop=of_rank[0][3],
            draft_rows=rows,
            drafts_by_stage=drafts_by_stage,
            swapped_block=swapped_block,
            swapped_window_block=swapped_window_block,
            swapped_state=swapped_state,
        )

    def _time_with_others(self, group: RankGroup, size: int, number: int, rows: int = 1) -> float:
        """Seconds of a step that all stages begin at the same time, as under load."""
        if self.pipeline is not None:
            group.comm.barrier()
        return self._time_step(size, number, rows)

    def _time_step(self, size: int, number: int, rows: int = 1) -> float:
        """Seconds of a step of ``size`` sequences, with tokens from all over the vocabulary. All sequences write to the first blocks.

        Args:
            number: index of the repetition; each has other tokens.
            rows: tokens of each sequence, all sampled. With an MTP layer the step also drafts ``rows - 1`` tokens.
        """
        sequences, vocab_size = range(size), self.layout.config.vocab_size
        tokens = [(seq_id * ROUNDS + number) * vocab_size // (size * ROUNDS) for seq_id in sequences]
        sampling, blocks = TokenSampling(num_prompt_tokens=1), list(range(self.cache.blocks_for(rows)))
        num_drafts = rows - 1 if self.layout.config.mtp is not None else 0
        all_blocks = list(range(self.cache.blocks_for(rows + num_drafts)))
        plan = BatchPlan(
            step_id=0,
            starts=[
                SequenceStart(
                    seq_id,
                    [(tokens[seq_id] + row * vocab_size // rows) % vocab_size for row in range(rows)],
                    sampling,
                    state_slot=seq_id,
                )
                for seq_id in sequences
            ],
            finished=[],
            moves=[],
            entries=[
                BatchEntry(
                    seq_id=seq_id,
                    num_tokens=rows,
                    begin=0,
                    position=0,
                    first_block=0,
                    new_blocks=all_blocks,
                    new_window_blocks=blocks,
                    num_samples=rows,
                    num_drafts=num_drafts,
                )
                for seq_id in sequences
            ],
        )
        arrival = None if self.place.stage == 0 else DummyActivations(self._hidden(size * rows, number))
        begin = time.perf_counter()
        batch, hidden_TD = self.worker.run_layers(plan, arrival)
        if self.layout.topology.is_last(self.place.stage):
            self.worker.sample(plan, batch, hidden_TD)
        else:
            hidden_TD.flatten()[:1].tolist()  # synchronizes an accelerator
        seconds = time.perf_counter() - begin
        self.worker.runner.forget(list(sequences))
        return seconds

    def _time_ring(self, group: RankGroup, number: int) -> float:
        """Seconds from sending a token's activations on stage 0 to receiving the result on rank 0; 0 on other ranks."""
        place, topology, step_id = self.place, self.layout.topology, -1 - number
        hidden_TD = self._hidden(1, number)
        if topology.place(0).stage > 0:  # stage 0 receives no result, so a barrier keeps it from running ahead
            group.comm.barrier()
        begin = time.perf_counter()
        has_result = place.rank == 0 and self.pipeline.results_travel
        result = self.pipeline.post_result(step_id, RING_BYTES) if has_result else None
        if (arrival := self.worker.post(step_id, 1)) is not None:
            arrival.wait()
        if not topology.is_last(place.stage):
            self.pipeline.send_activations(step_id, hidden_TD)
        elif place.rank == topology.sampling_rank and self.pipeline.results_travel:
            self.pipeline.send_result(step_id, bytes(RING_BYTES), RING_BYTES)
        if result is not None:
            result.wait()
        return time.perf_counter() - begin if place.rank == 0 else 0.0

    def _time_swap(self, *kinds: MoveKind) -> float:
        """Seconds to swap the first block or state to host memory and back."""
        seconds = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            self.cache.move([CacheMove(kind, [0], [0]) for kind in kinds])
            seconds.append(time.perf_counter() - begin)
        return min(seconds)

    def _hidden(self, size: int, number: int) -> torch.Tensor:
        """Random activations (T, D) in this stage's dtype; equal on all ranks, so that they select the same experts."""
        hidden_TD = torch.randn(
            size, self.layout.config.activation_size, generator=torch.Generator().manual_seed(number)
        )
        return hidden_TD.to(torch_device(self.layout.devices[self.place.rank]), self.layout.dtype(self.place))
