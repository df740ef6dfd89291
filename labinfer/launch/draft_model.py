"""LoadedDraftModel: a draft model that one rank holds whole, with its own KV blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.plan import BatchPlan, BatchResult
from labinfer.base.speculative_options import FLAG
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.spmd.devices import torch_device
from labinfer.comm.spmd.environment import LaunchEnvironment
from labinfer.comm.spmd.machine import RankInfo, free_memory
from labinfer.comm.spmd.topology import Place
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.engine.cache_capacity import STATES_EACH, draft_states_that_fit
from labinfer.functions.graph import Capture
from labinfer.functions.provider import Provider
from labinfer.launch.layout.draft_layout import draft_options, make_draft_layout
from labinfer.launch.layout.layout import Layout
from labinfer.launch.load_stage import load_stage
from labinfer.launch.providers import make_registry
from labinfer.launch.runner import make_runner
from labinfer.launch.tune import try_functions
from labinfer.models.registry import load_config
from labinfer.weights.loader import check_checkpoint, weight_bytes
from labinfer.weights.model_files import open_model
from labinfer.weights.resolve import resolve_model
from labinfer.weights.weight_cache import WeightCache
from labinfer.worker.model_runner import ModelRunner


class LoadedDraftModel:
    """Draft model with loaded weights. It has no KV blocks until ``make_cache``.

    Args:
        options: options of the draft model; see ``draft_options``.
        layout: layout of the target model.
        providers: function providers, prepared for this rank's device.
        weight_cache: cache of packed weights; None to disable it.
        anew: whether to ignore cached results of kernel trials.

    Raises:
        UserError: the draft model is not found, or cannot draft for the target model.
    """

    def __init__(
        self,
        group: RankGroup,
        options: EngineOptions,
        layout: Layout,
        *,
        providers: list[Provider],
        weight_cache: WeightCache | None,
        anew: bool = False,
    ):
        self.directory, self.layout = plan_draft_model(options, group.environment, layout, group.everyone)
        config, tp = self.layout.config, TensorParallelCommunicator(LocalCommunicator())
        registry = make_registry(providers, self.layout.quantization_group_size, self.layout.weights)
        try_functions(self.layout, self.place, registry, {}, providers, anew=anew)  # at the draft model's sizes
        self._functions = self.layout.select_functions(self.place, registry)
        checkpoint = open_model(self.directory).open_weights()
        check_checkpoint(
            self.layout.meta(self.place).model, checkpoint, config.tied_embeddings, options.model.ignore_tensors
        )
        self._model = load_stage(
            checkpoint,
            options,
            self.layout.stage_context(self.place, tp, self._functions),
            self.layout,
            self.place,
            directory=self.directory,
            providers=providers,
            cache=weight_cache,
            on_progress=lambda done, total: None,
        )
        self.weight_bytes = weight_bytes(self._model)
        self._max_num_batched_tokens = options.scheduler.max_num_batched_tokens
        per_state = self.layout.meta(self.place).bytes_per_sequence
        sharing = layout.sharing_device(group.rank, group.everyone)
        device = torch_device(self.layout.devices[0])
        room = free_memory(device, options.cache.num_kv_blocks) / sharing * options.cache.memory_utilization
        num_states = draft_states_that_fit(int(room), per_state, options.scheduler.max_num_seqs)
        if per_state and num_states < STATES_EACH:
            raise UserError(
                f"the draft model {options.model.model} has too little memory for {STATES_EACH} recurrent states "
                f"of {per_state} bytes on rank {group.rank}; raise --memory-utilization or choose another draft "
                "model"
            )
        self.sizes = CacheSizes(num_blocks=0, num_states=num_states, max_model_len=self.layout.max_model_len)
        self.state_bytes = num_states * per_state
        self._runner: ModelRunner | None = None

    @property
    def place(self) -> Place:
        """Place of this rank in the draft model's layout, which has a single place."""
        return self.layout.topology.place(0)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block of the draft model."""
        return self.layout.block_bytes(self.place)

    def make_cache(self, num_blocks: int, max_num_seqs: int, capture: Capture | None) -> None:
        """Allocate ``num_blocks`` KV blocks, or fewer if ``max_num_seqs`` sequences cannot fill them."""
        num_blocks = min(num_blocks, self.layout.useful_blocks(max_num_seqs))
        self.sizes = dataclasses.replace(self.sizes, num_blocks=num_blocks)
        self._runner = make_runner(
            self._model,
            self.layout,
            self.place,
            self.sizes,
            functions=self._functions,
            capture=capture,
            max_num_batched_tokens=self._max_num_batched_tokens,
        )

    def run(self, plan: BatchPlan) -> BatchResult:
        """Run the tokens of a plan and sample the next token of each entry that asks for one."""
        batch = self._runner.prepare(plan)
        return self._runner.sample(plan, batch, self._runner.run(plan, batch, None))

    def close(self) -> None:
        """Free the weights and the KV cache."""
        self._model = self._runner = None


def plan_draft_model(
    options: EngineOptions, environment: LaunchEnvironment, layout: Layout, everyone: Sequence[RankInfo]
) -> tuple[Path, Layout]:
    """Directory (or GGUF file) and layout of a draft model; loads no weights.

    Args:
        options: options of the draft model; see ``draft_options``.
        environment: names the folder of models and the hub.
        layout: layout of the target model.

    Raises:
        UserError: the draft model is not found, or cannot draft for the target model.
    """
    try:
        hub = options.model.hub_or(environment.hub)
        directory = resolve_model(options.model.model, environment.model_dir, may_download=True, hub=hub)
    except UserError as error:
        raise UserError(f"the draft model of {FLAG}: {error}") from None
    return directory, make_draft_layout(options, load_config(directory), layout, everyone)


def load_draft_model(
    group: RankGroup,
    options: EngineOptions,
    layout: Layout,
    *,
    providers: list[Provider],
    weight_cache: WeightCache | None,
) -> LoadedDraftModel:
    """Load the draft model of ``options`` on this rank; see ``LoadedDraftModel``."""
    own = draft_options(options, options.scheduler.speculative_config.model, layout)
    is_anew = options.model.autotune == "again"  # of the target model: a draft model is not autotuned
    return LoadedDraftModel(group, own, layout, providers=providers, weight_cache=weight_cache, anew=is_anew)


def load_draft_model_beside(
    group: RankGroup,
    options: EngineOptions,
    layout: Layout,
    *,
    providers: list[Provider],
    weight_cache: WeightCache | None,
) -> LoadedDraftModel | None:
    """Load the draft model that rank 0 holds in addition to its stage. None on other ranks, and if the draft model has its own rank or is absent."""
    speculation = options.scheduler.speculative_config
    if group.rank > 0 or speculation is None or not speculation.model or speculation.draft_rank:
        return None
    return load_draft_model(group, options, layout, providers=providers, weight_cache=weight_cache)
