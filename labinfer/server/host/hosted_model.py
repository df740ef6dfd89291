"""HostedModel: a model that the engine host serves, with its open requests and counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labinfer.api.llm import LLM
from labinfer.base.rank_stats import WorkerStats
from labinfer.engine.driver import StepOutputs
from labinfer.engine.scheduler import InFlight
from labinfer.server.host.stage_slowdown import StageSlowdownDetector
from labinfer.server.link.frames import MachineLinkInfo, ModelInfo, RankShardInfo
from labinfer.server.link.stats import NUM_STEP_BUCKETS, Drift, step_bucket


@dataclass(kw_only=True)
class HostedModel:
    """A model that the engine host serves, with its open requests and counters."""

    name: str
    llm: LLM
    recommended: dict[str, int | float]
    """Sampling parameters recommended by the checkpoint."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic time in seconds."""
    slowdown_detector: StageSlowdownDetector | None = None
    """Detector of stages that slow down; None with one stage."""
    handled_drift: Drift | None = None
    """Last ``Drift`` of ``slowdown_detector`` that was handled, so that each drift is logged once; None if none was handled."""
    plan: str = ""
    """Table of the layout and its alternatives; empty if the layout was not planned."""
    machine_links: Sequence[MachineLinkInfo] = ()
    """Links between machines that were measured for the plan of the layout."""
    changed: str = ""
    """Description of changed model files; see ``ModelInfo``."""
    unread_prompts: dict[str, int] = field(default_factory=dict)
    """Prompt length, in tokens, of each open request that has no output yet, by request id."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    step_tokens: int = 0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * NUM_STEP_BUCKETS)
    last_step: float = 0.0
    """Time of the last completed step or, if later, the time at which the idle engine got work; by ``clock``."""
    working_seconds: float = 0.0
    bubbles: dict[int, float] = field(default_factory=dict)
    """Maps each rank to its pipeline bubble in seconds, as it was last sent to the gateway."""
    watched: list[InFlight] = field(default_factory=list)
    """Completed steps for the next ``Trace`` frame: at most ``watched_most`` since the last ``Trace`` frame."""
    watched_most: int = 0

    def step(self, launches: bool = True) -> StepOutputs:
        """Step the engine and update the counters; return the outputs by request id.

        Args:
            launches: whether new steps may start; see ``EngineDriver.step``.
        """
        outputs, engine = self.llm.driver.step(launches), self.llm.engine
        batch = engine.last_batch
        if batch is not None:
            num_tokens = batch.plan.num_tokens
            self.num_steps += 1
            self.step_tokens += num_tokens
            self.steps_by_tokens[step_bucket(num_tokens)] += 1
            if self.slowdown_detector is not None:
                self.slowdown_detector.add_step(num_tokens)
            if len(self.watched) < self.watched_most:
                self.watched.append(batch)
        for request_id, update in outputs:
            self.prompt_tokens += self.unread_prompts.pop(request_id, 0)
            self.generation_tokens += len(update.token_ids) or update.embedding is None  # 1 with beam search
        now = self.clock()
        self.working_seconds += now - self.last_step
        self.last_step = now
        return outputs

    def bubble(self, rank: WorkerStats, worked: float) -> float:
        """Pipeline bubble of a rank in seconds: time in which the engine had work, and the rank did not compute. ``worked`` and the
        rank's stats are read at slightly different times, so a smaller value than the last one is replaced by that: a counter never
        decreases."""
        self.bubbles[rank.rank] = max(self.bubbles.get(rank.rank, 0.0), worked - rank.busy_time)
        return self.bubbles[rank.rank]

    def describe(self) -> ModelInfo:
        """Make the description of the model that is sent to the gateway."""
        llm, options = self.llm, self.llm.options
        tokenizer = Path(
            options.model.tokenizer or llm.directory
        ).resolve()  # the gateway has another working directory
        return ModelInfo(
            name=self.name,
            tokenizer=str(tokenizer),
            tokenizer_digest=llm.inputs.tokenizer_digest,
            needs_tokenizer=bool(options.model.tokenizer),
            response_template=_absolute(options.model.response_template),
            chat_template=_absolute(options.model.chat_template),
            recommended=self.recommended,
            vocab_size=llm.spec.vocab_size,
            hidden_size=llm.spec.hidden_size,
            pooling=llm.spec.pooling,
            score_head=llm.spec.score_head,
            max_model_len=llm.spec.max_model_len,
            context_shift=options.scheduler.context_shift,
            num_layers=llm.layout.config.num_layers,
            num_parameters=llm.layout.num_parameters,
            block_size=options.cache.tokens_per_block,
            num_blocks=llm.spec.num_blocks,
            num_window_blocks=llm.spec.num_window_blocks,
            max_num_seqs=options.scheduler.max_num_seqs,
            pipeline_schedule=options.scheduler.pipeline_schedule,
            stage_latency_seconds=llm.spec.step_times.hop if llm.spec.step_times else 0.0,
            machine_links=list(self.machine_links),
            plan=self.plan,
            changed=self.changed,
            fingerprint=llm.fingerprint.with_defaults(self.recommended).digest,
            reproducible=llm.fingerprint.reproducible,
            ranks=list(self._ranks()),
        )

    def _ranks(self) -> Iterator[RankShardInfo]:
        layout, everyone = self.llm.layout, self.llm.group.everyone
        for place in layout.topology.places:
            begin, end = layout.topology.layers[place.stage]
            yield RankShardInfo(
                rank=place.rank,
                stage=place.stage,
                tp_rank=place.tp_rank,
                host=everyone[place.rank].node,
                device=str(layout.devices[place.rank]),
                first_layer=begin,
                num_layers=end - begin,
                dtype=str(layout.dtype(place)).removeprefix("torch."),
                kv_dtype=str(layout.kv_dtype(place)).removeprefix("torch."),
                quantization=layout.quantization_name(place),
                weight_bytes=layout.weight_bytes(place),
                kv_bytes=layout.cache_bytes(place, self.llm.spec.num_blocks, self.llm.spec.num_window_blocks),
            )


def _absolute(template: str) -> str:
    """Absolute path of a template file, as the gateway has another working directory. The name of a built-in template
    is returned unchanged."""
    path = Path(template)
    return str(path.resolve()) if template and path.is_file() else template
