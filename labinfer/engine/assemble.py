"""Engine assembly: builds an ``LLMEngine`` from options, an ``EngineSpec``, an executor and a clock (real or simulated)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from labinfer.base.config import CacheOptions, SchedulerOptions
from labinfer.base.registry import REGISTRY
from labinfer.base.tracer import Tracer
from labinfer.engine.beam_search import BeamSearch
from labinfer.engine.block_manager import BlockManager
from labinfer.engine.block_tables import BlockTables
from labinfer.engine.draft_model import DraftModel, DraftModelProposer
from labinfer.engine.drafts import Drafts
from labinfer.engine.executor import Executor
from labinfer.engine.guide import GuideMaker
from labinfer.engine.llm_engine import LLMEngine
from labinfer.engine.micro_batches import MicroBatchCount
from labinfer.engine.proposer import Proposer
from labinfer.engine.remote_drafts import DraftChannel, Drafter, RemoteProposer
from labinfer.engine.scheduler import Scheduler
from labinfer.engine.spec import EngineSpec
from labinfer.engine.speculation import Speculation
from labinfer.engine.state_slots import StateSlots
from labinfer.engine.windowed_blocks import WindowedBlocks


def make_engine(
    spec: EngineSpec,
    executor: Executor,
    *,
    cache: CacheOptions,
    scheduling: SchedulerOptions,
    clock: Callable[[], float],
    recorder: Tracer | None = None,
    guides: GuideMaker | None = None,
    proposer: Proposer | None = None,
    draft_model: DraftModel | None = None,
    draft_channel: DraftChannel | None = None,
) -> LLMEngine:
    """Assemble an engine.

    Args:
        executor: runs the plans, on the ranks of a group or in a simulator.
        clock: monotonic seconds.
        recorder: traces the engine's time; None traces nothing.
        guides: makes guides for structured outputs; None if no request has any.
        proposer: drafts tokens; None for no speculative decoding.
        draft_model: replaces ``proposer`` by a draft model on this rank.
        draft_channel: replaces ``proposer`` by a draft model on another rank.
    """
    if draft_model is not None:
        proposer = make_draft_proposer(draft_model, cache, scheduling.max_num_batched_tokens, spec.eos_token_ids)
    if draft_channel is not None:
        proposer = RemoteProposer(draft_channel, spec.eos_token_ids)
    scheduler = make_scheduler(spec, cache=cache, scheduling=scheduling, clock=clock, proposer=proposer)
    return LLMEngine(
        scheduler,
        executor,
        spec,
        options=scheduling,
        recorder=recorder or Tracer(),
        groups=BeamSearch(scheduler, scheduling, spec.vocab_size),
        guides=guides,
    )


def make_drafter(draft_model: DraftModel, *, cache: CacheOptions, scheduling: SchedulerOptions) -> Drafter:
    """Assemble the ``Drafter`` of a dedicated draft-model rank. Each ``DraftStart`` brings the sequence's stop tokens."""
    return Drafter(make_draft_proposer(draft_model, cache, scheduling.max_num_batched_tokens, eos_token_ids=()))


def make_draft_proposer(
    draft_model: DraftModel, cache: CacheOptions, max_tokens: int, eos_token_ids: Iterable[int]
) -> DraftModelProposer:
    """Assemble the proposer of a draft model, over empty pools of that model's KV blocks and states.

    Args:
        cache: KV-cache options, which also apply to the draft model's cache.
        max_tokens, eos_token_ids: see ``DraftModelProposer``.
    """
    sizes = draft_model.sizes
    states = StateSlots(sizes.num_states) if sizes.num_states else None
    tables = BlockTables(*make_pools(sizes.num_blocks, 0, cache, can_share=states is None), states)
    return DraftModelProposer(draft_model, tables, max_tokens, eos_token_ids)


def make_pools(
    num_blocks: int, num_host_blocks: int, cache: CacheOptions, *, can_share: bool = True
) -> tuple[BlockManager, BlockManager]:
    """Make an empty pool of KV blocks, and one in host memory for swapped-out blocks.

    Args:
        can_share: whether sequences can reuse the blocks of others (prefix cache).
    """
    eviction = REGISTRY.find("prefix_cache_eviction", cache.prefix_cache_eviction)
    return (
        BlockManager(num_blocks, cache.tokens_per_block, cache.enable_prefix_caching and can_share, eviction),
        BlockManager(num_host_blocks, cache.tokens_per_block, prefix_caching=False),
    )


def make_scheduler(
    spec: EngineSpec,
    *,
    cache: CacheOptions,
    scheduling: SchedulerOptions,
    clock: Callable[[], float],
    proposer: Proposer | None = None,
) -> Scheduler:
    """Assemble a scheduler over empty pools of KV blocks and states."""
    blocks, host = make_pools(spec.num_blocks, spec.num_host_blocks, cache, can_share=spec.is_causal)
    windows = states = None
    if spec.window:
        windows = WindowedBlocks(
            spec.window,
            min(scheduling.chunked_prefill_size, scheduling.max_num_batched_tokens),
            *make_pools(spec.num_window_blocks, spec.num_host_window_blocks, cache),
        )
    if spec.num_states:
        eviction = REGISTRY.find("prefix_cache_eviction", cache.prefix_cache_eviction)
        states = StateSlots(spec.num_states, spec.num_host_states, cache.snapshot_interval, eviction)
    tables = BlockTables(blocks, host, states, windows)
    micro_batches = MicroBatchCount(spec.num_stages, spec.step_times, scheduling.max_inflight, spec.drafting_stage)
    drafts = Speculation()
    if proposer is not None:
        drafts = make_drafts(proposer, tables, spec, scheduling, micro_batches=micro_batches, clock=clock)
    return Scheduler(
        scheduling,
        tables,
        spec.num_stages,
        micro_batches=micro_batches,
        drafts=drafts,
        eos_token_ids=spec.eos_token_ids,
        times=spec.step_times,
        whole_prompts=not spec.is_causal,
        clock=clock,
    )


def make_drafts(
    proposer: Proposer,
    tables: BlockTables,
    spec: EngineSpec,
    scheduling: SchedulerOptions,
    *,
    micro_batches: MicroBatchCount,
    clock: Callable[[], float],
) -> Drafts:
    """Assemble the ``Drafts`` (speculative decoding) of a scheduler."""
    speculation = scheduling.speculative_config
    max_chunk = min(scheduling.chunked_prefill_size, scheduling.max_num_batched_tokens)
    room = max(0, max_chunk - 1)
    continuous = speculation.continuous if speculation else None
    return Drafts(
        proposer,
        tables,
        max_tokens=min(room, speculation.max_tokens) if speculation else room,
        max_chunk=max_chunk,
        vocab_size=spec.vocab_size,
        clock=clock,
        draft_times=micro_batches if spec.step_times else None,
        chooses_lengths=scheduling.chooses_drafts,
        continuous=spec.num_stages > 1 and (not spec.is_one_cpu_host if continuous is None else continuous),
    )
