"""EngineSpec: properties of a model and its layout that the engine needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.pooling import PoolingConfig
from labinfer.base.rank_stats import StepTimes


@dataclass(frozen=True, kw_only=True)
class EngineSpec(CacheSizes):
    """Cache sizes and other properties of a loaded model, or of one that a simulator assumes."""

    num_stages: int = 1
    vocab_size: int
    """Number of valid token ids."""
    hidden_size: int
    """Hidden size, which is the length of a pooled prompt's vector."""
    pooling: PoolingConfig = PoolingConfig()
    """Default pooling, for requests that name none."""
    score_head: Any = None
    """``ScoreHead`` of a classifier or reranker, whose pooled prompts have its logits; None for other models."""
    no_generation: str = ""
    """Reason why generation is refused, see ``ModelConfig.no_generation``; empty if the model can generate."""
    is_causal: bool = True
    """Whether attention is causal. If not, a prompt is run in one step and shares no KV blocks."""
    dynamic_rope_from: int = 0
    """Prompt length above which the KV cache depends on that length (dynamic RoPE), so that only prompts of equal
    length share it; 0 for never."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end an answer unless its request ignores them."""
    drafting_stage: int | None = 0
    """Stage of the rank that runs the drafter; steps of this stage wait while it drafts. None if a spare rank drafts."""
    is_one_cpu_host: bool = False
    """Whether all stages compute on CPUs of one machine, where busy stages use the cores of idle ones."""
    step_times: StepTimes | None = None
    """Measured step times; None without measurements."""
