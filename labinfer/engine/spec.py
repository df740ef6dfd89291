"""EngineSpec: the numbers of a model and its layout that an engine decides by."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.pooling import PoolingConfig
from labinfer.base.rank_stats import StepTimes


@dataclass(frozen=True, kw_only=True)
class EngineSpec(CacheSizes):
    """The cache sizes and other numbers of a loaded model, or of a supposed one, whose numbers a simulator states."""

    num_stages: int = 1
    vocab_size: int
    """Token ids that a prompt may hold."""
    hidden_size: int
    """Numbers of the vector that a pooled prompt comes to."""
    pooling: PoolingConfig = PoolingConfig()
    """Pooling of requests that do not name one."""
    no_generation: str = ""
    """Reason why generation is refused, see ``ModelConfig.no_generation``; empty if the model can generate."""
    is_causal: bool = True
    """Whether a token attends to itself and earlier ones only; otherwise a prompt is run in one step and shares no KV blocks."""
    dynamic_rope_from: int = 0
    """Tokens of a prompt from which its KV cache depends on its length, so that only prompts of one length share it; 0 for never."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer unless its request ignores them."""
    drafting_stage: int | None = 0
    """The stage of the rank that drafts, whose steps wait for it; None where that is a spare rank."""
    is_one_cpu_host: bool = False
    """Whether all stages compute on CPUs of one machine, whose cores no stage has to leave idle."""
    step_times: StepTimes | None = None
    """Seconds of a step; None where nothing was measured."""
