"""make_rank0_engine: makes the engine of rank 0, and the executor that sends its plans to all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from labinfer.base.config import EngineOptions
from labinfer.engine.assemble import make_engine
from labinfer.engine.llm_engine import LLMEngine
from labinfer.engine.proposer import Proposer
from labinfer.engine.spec import EngineSpec
from labinfer.launch.rank_runtime import RankRuntime
from labinfer.text.guidance import GrammarGuideMaker
from labinfer.worker.spmd import SpmdExecutor


def engine_spec(parts: RankRuntime) -> EngineSpec:
    """Parameters of a model's engine, from the model's layout and KV cache capacity; equal on every rank."""
    layout = parts.layout
    return EngineSpec(
        **asdict(parts.capacity.sizes),
        num_stages=layout.topology.num_stages,
        vocab_size=layout.config.vocab_size,
        hidden_size=layout.config.hidden_size,
        pooling=layout.config.pooling,
        score_head=layout.config.score_head and layout.config.score_head.head,
        dynamic_rope_from=layout.config.dynamic_rope_from,
        no_generation=layout.config.no_generation,
        is_causal=layout.config.is_causal,
        eos_token_ids=layout.config.eos_token_ids,
        drafting_stage=None if layout.draft_devices else layout.topology.place(0).stage,
        is_one_cpu_host=layout.is_one_cpu_host,
        step_times=parts.step_times,
    )


def make_rank0_engine(
    spec: EngineSpec,
    parts: RankRuntime,
    options: EngineOptions,
    *,
    model: int,
    clock: Callable[[], float],
    guides: GrammarGuideMaker,
    proposer: Proposer | None,
) -> tuple[LLMEngine, SpmdExecutor]:
    """Make the engine of a model, and the executor that the engine uses.

    Args:
        parts: runtime of rank 0.
        model: index of the model among the models that this group of ranks has loaded.
        guides: maker of the guides that enforce structured output.
        proposer: drafter for speculative decoding; None without speculation or with a draft model.
    """
    executor = SpmdExecutor(
        parts.channel,
        parts.worker,
        parts.pipeline,
        parts.stats,
        parts.recorder,
        model=model,
        on_end=parts.drafts.end_run if parts.drafts is not None else lambda: None,
    )
    engine = make_engine(
        spec,
        executor,
        cache=options.cache,
        scheduling=options.scheduler,
        clock=clock,
        recorder=parts.recorder,
        guides=guides,
        proposer=proposer,
        draft_model=parts.draft_model,
        draft_channel=parts.drafts,
    )
    return engine, executor
