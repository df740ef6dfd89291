"""Everything between a joined group and a worker that can run: model, communicators, KV cache."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError, first_line
from labinfer.base.rank_stats import StepTimes
from labinfer.comm.control import ControlChannel
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.pipeline import PipelineCommunicator
from labinfer.comm.spmd.address_space import describe_limit
from labinfer.comm.spmd.machine import keep_freed_memory, return_freed_memory
from labinfer.comm.spmd.topology import Place
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.functions.expert_offload import needs_compiled_experts
from labinfer.functions.provider import Provider
from labinfer.functions.providers import make_providers, make_registry
from labinfer.functions.registry import parse_overrides
from labinfer.launch.answer_files import AnswerFiles, identify_answer_files, setting_stamps
from labinfer.launch.draft_model import DraftModel, load_draft_model
from labinfer.launch.draft_rank import DraftRank, RemoteLink, build_draft_rank
from labinfer.launch.layout.kv_capacity import DraftRoom, KVCapacity, agree_on_blocks
from labinfer.launch.layout.layout import Layout, make_layout
from labinfer.launch.lent_cores import share_cores
from labinfer.launch.links import Links, connect, make_links
from labinfer.launch.measure.measure import StepMeter
from labinfer.launch.mtp_check import check_mtp
from labinfer.launch.packed_files import packed_files
from labinfer.launch.tune import make_rank_calls, tune
from labinfer.models.config import ModelConfig
from labinfer.models.layers.context import StageContext
from labinfer.models.registry import load_config, model_class, with_window
from labinfer.native import compiler
from labinfer.observe.progress_line import compile_progress
from labinfer.observe.recorder import CAPACITY, Recorder
from labinfer.weights.checkpoint import open_checkpoint
from labinfer.weights.loader import check_checkpoint, load_weights, weight_bytes
from labinfer.weights.model_files import config_path
from labinfer.weights.resolve import resolve_model
from labinfer.weights.weight_cache import WeightCache, checkpoint_digest
from labinfer.worker.kv_cache import KVCacheManager
from labinfer.worker.model_runner import CAPTURED_BYTES, ModelRunner, captures_steps
from labinfer.worker.spmd import StatsReporter
from labinfer.worker.step_sink import StepSinks
from labinfer.worker.worker import Worker

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RankParts:
    """Parts that a rank runs with."""

    layout: Layout
    place: Place
    directory: Path
    channel: ControlChannel
    tp: TensorParallelCommunicator
    pipeline: PipelineCommunicator | None
    worker: Worker
    stats: StatsReporter
    recorder: Recorder
    capacity: KVCapacity
    step_times: StepTimes | None
    """None where nothing depends on them."""
    lends_cores: bool
    """Whether all stages lend each other their cores while they wait."""
    draft_model: DraftModel | None = None
    """On rank 0, where one drafts there."""
    drafts: RemoteLink | None = None
    """On rank 0, where a spare rank drafts."""

    def close(self) -> None:
        """Let go of the weights and KV caches."""
        if self.drafts is not None:
            self.drafts.close()
        self.worker.close()
        if self.draft_model is not None:
            self.draft_model.close()


def find_model(
    group: RankGroup, options: EngineOptions, on_found: Callable[[Path], None] = lambda directory: None
) -> tuple[Path, ModelConfig]:
    """The model's directory and config on every rank; one rank of each node may download it first.

    Args:
        on_found: called with the directory before the config is read.

    Raises:
        AgreedError: it is nowhere, or not the same everywhere.
    """
    model_dir = group.environment.model_dir
    downloads = group.environment.local_rank == 0
    with group.together():
        if downloads:
            resolve_model(options.model.model, model_dir, may_download=True)
    with group.together():
        directory = resolve_model(options.model.model, model_dir, may_download=False)
        on_found(directory)
        config = load_config(directory, with_mtp=options.scheduler.has_mtp)
        check_mtp(options, config, directory)
    digests = group.comm.all_gather_bytes(hashlib.blake2b(repr(config).encode(), digest_size=16).digest())
    with group.together():
        if digests[group.rank] != digests[0]:
            raise UserError(
                f"{config_path(directory)} differs from rank 0's on {group.everyone[0].node}; put the same checkpoint on every node"
            )
    if window := options.model.sliding_window:
        with group.together():
            config = with_window(config, window)
    return directory, config


def build_rank(
    group: RankGroup,
    options: EngineOptions,
    on_progress: Callable[[int, int], None],
    channel: ControlChannel | None = None,
    shares_channel: bool = False,
) -> tuple[RankParts | DraftRank | None, AnswerFiles]:
    """Load this rank's share and connect it; collective over the group. Returns its parts, which are None on a spare rank that does
    not draft, and the files that it read, whose ``check_loaded`` the caller owes.

    Args:
        channel: that of another model of this group, which it is to share; None on a spare rank.
        shares_channel: whether there is another model; without one a channel is made.

    Raises:
        AgreedError: the layout, the checkpoint or the memory is not as it should be, on any rank.
        FilesChanged: the config was written to meanwhile.
    """
    config_stamps: dict[str, str] = {}
    directory, config = find_model(group, options, lambda path: config_stamps.update(setting_stamps(path)))
    with group.together():
        layout = make_layout(options, config, group.everyone)
    files = identify_answer_files(group, options, directory, layout)
    files.check_read(config_stamps)
    may_share = options.parallel.transport == "auto"
    links = make_links(group, layout, channel, shares_channel=shares_channel, may_share=may_share)
    placed = layout.topology.placed_ranks
    with group.together() if len(placed) < group.size else nullcontext():  # spare ranks wait here, and hear of refusals
        if group.rank in placed:
            return build_placed(links, options, config, directory, layout, on_progress=on_progress), files
        drafts = group.rank in layout.draft_devices
        group.progress.label = f"rank {group.rank} ({'drafts' if drafts else 'spare'})"
        if drafts:
            with memory_for("the draft model", layout.draft_devices[group.rank]):
                drafting = build_draft_rank(
                    group,
                    options,
                    layout,
                    links.drafts,
                    providers=prepare_providers(links.placed, layout.draft_devices[group.rank]),
                    weight_cache=WeightCache.from_home(options.cache.weight_cache_size),
                )
                return drafting, files
    return None, files


def build_placed(
    links: Links,
    options: EngineOptions,
    config: ModelConfig,
    directory: Path,
    layout: Layout,
    *,
    on_progress: Callable[[int, int], None],
    is_whole: bool = True,
) -> RankParts:
    """The parts of a rank that has a place; collective over the ranks that have one.

    Args:
        is_whole: whether the layout has all layers of the checkpoint.
    """
    group = links.placed
    place = layout.topology.place(group.rank)
    with group.together():
        if options.scheduler.context_shift and not layout.meta(place).can_shift:
            raise UserError(
                "--context-shift does not go with this model: no token can be taken out of the states that its layers keep, or "
                "its keys cannot be rotated further; leave it out"
            )
    group.progress.label = str(place)
    topology, device = layout.topology, layout.devices[group.rank]
    tp, pipeline = connect(links, layout, place, may_share=options.parallel.transport == "auto")

    with group.together():
        checkpoint = open_checkpoint(directory)
        check_mtp(options, config, directory, checkpoint.names)
        cache = WeightCache.from_home(options.cache.weight_cache_size)
        if is_whole and group.rank == 0 and not (cache is not None and cache.knows(checkpoint_digest(directory))):
            whole = layout.whole()
            check_checkpoint(
                whole.meta(whole.topology.place(0)).model,
                checkpoint,
                config.tied_embeddings,
                options.model.ignore_tensors,
            )
        if group.rank == 0:
            for warning in (
                *config.notes,
                *(config.formats.warnings if set(layout.quantizations) != {"none"} else ()),
            ):
                logger.warning("%s", warning)
            if config.pooling.warning:
                logger.warning("%s", config.pooling.warning)
    logger.debug("the layout is made, the ranks are connected, the checkpoint is open")
    dtype = layout.dtype(place)
    providers, overrides = prepare_providers(group, device), parse_overrides(options.model.functions)
    lends_cores = share_cores(group, links.machine, layout, place, providers)
    registry = make_registry(providers, layout.quantization_group_size, layout.weights)
    with group.together():
        registry.check(device, dtype, overrides, layout.rounding(place))
    choice = None
    if options.model.autotune != "off":
        calls = make_rank_calls(layout, place, registry, overrides, options.cache.block_size)
        choice = tune(
            group,
            layout,
            place,
            calls,
            cache=cache_folder(),
            providers=providers,
            anew=options.model.autotune == "again",
        )
    logger.debug("functions are chosen")
    with group.together(), memory_for("the weights", device):
        context = layout.stage_context(place, tp, registry, overrides, choice)
        if context.head_preview and context.is_last and not has_compiled_preview(context):
            logger.warning("--head-preview has no effect: no compiled function multiplies with the output head here")
            context = dataclasses.replace(context, head_preview=False)
        offload = None
        if layout.expert_memory:
            folder = cache_folder() or Path(tempfile.gettempdir())
            offers = (provider.expert_offload(layout.expert_memory, folder) for provider in providers)
            if (offload := next(filter(None, offers), None)) is None:
                raise needs_compiled_experts()
            context = dataclasses.replace(context, functions=offload.offload(context.functions))
        with torch.device("meta"):
            model = model_class(config)(config, context).eval()
        for functions in filter(None, (provider.loading() for provider in providers)):
            checkpoint.functions = functions
        if device.type == "cpu":
            keep_freed_memory()  # a matrix goes where the one before it was decoded
        load_weights(
            model,
            checkpoint,
            device,
            on_progress,
            packed_files(cache, options, layout, place, directory, providers=providers),
        )
    logger.debug("weights are loaded: %d MiB read", checkpoint.bytes_read >> 20)
    layout = dataclasses.replace(layout, loaded_bytes=_gather_weight_bytes(group, model))
    draft_model, speculative = None, options.scheduler.speculative_config
    with group.together(), memory_for("the draft model's weights", device):
        if speculative is not None and speculative.model and not speculative.draft_rank and group.rank == 0:
            draft_model = load_draft_model(
                options,
                speculative.model,
                group.environment.model_dir,
                layout,
                group.everyone,
                providers=providers,
                weight_cache=cache,
            )
        # Memory of tuning, decoding and packing, on all ranks before any of them looks how much is free.
        return_freed_memory()
    draft_room = DraftRoom()
    if draft_model is not None:
        draft_room = DraftRoom(draft_model.block_bytes(options.cache.block_size), draft_model.state_bytes)
    capture = None
    if captures_steps(device, tp.size):
        capture = next(filter(None, (provider.capture() for provider in providers)), None)
    captured_bytes = 0 if capture is None else CAPTURED_BYTES * (1 if draft_model is None else 2)
    capacity = agree_on_blocks(group, options, layout, place, draft=draft_room, captured_bytes=captured_bytes)
    if group.rank == 0 and (shortfall := capacity.describe_shortfall(layout.topology.places, options.cache.block_size)):
        logger.warning("KV cache: %s", shortfall)
    if not layout.config.is_causal and group.rank == 0:
        logger.info(
            "the model is not causal and runs a prompt in one step: the context is %d tokens; --max-num-batched-tokens raises it",
            layout.max_model_len,
        )
    if capacity.max_model_len < layout.max_model_len and group.rank == 0:
        logger.info(
            "the context is cut from %d to %d tokens: that is all the KV cache holds",
            layout.max_model_len,
            capacity.max_model_len,
        )
    layout = dataclasses.replace(layout, max_model_len=capacity.max_model_len)
    with group.together(), memory_for("the KV cache", device):
        cache = KVCacheManager(
            model.cache_specs(),
            num_blocks=capacity.num_blocks,
            block_size=options.cache.block_size,
            dtype=layout.kv_dtype(place),
            device=device,
            rotary_table=model.rotary_table,
            num_host_blocks=capacity.num_host_blocks,
            num_window_blocks=capacity.num_window_blocks,
            num_host_window_blocks=capacity.num_host_window_blocks,
            num_states=capacity.num_states,
            num_host_states=capacity.num_host_states,
        )
        model.make_rotary_tables(capacity.max_model_len, device, options.scheduler.max_num_batched_tokens)
        if draft_model is not None:
            draft_model.make_cache(
                capacity.num_blocks, options.cache.block_size, options.scheduler.max_num_seqs, capture
            )
    logger.debug("KV cache and rotary tables are made")
    runner = ModelRunner(model, cache, device=device, dtype=dtype, functions=context.functions, capture=capture)
    with group.together():
        sinks = StepSinks(options.observe.step_sink, place)
    recorder = Recorder()
    worker = Worker(
        runner,
        pipeline,
        group.progress,
        device=device,
        incoming=layout.dtypes[place.stage - 1] if place.stage > 0 else None,
        hidden_size=config.activation_size,
        is_last=topology.is_last(place.stage),
        is_sampling_rank=group.rank == topology.sampling_rank,
        recorder=recorder,
        sinks=sinks,
    )
    times = None
    measures = options.scheduler.chooses_drafts or (pipeline is not None and not options.scheduler.max_inflight)
    if capacity.num_host_blocks or measures:
        times = StepMeter(layout, place, worker, pipeline, cache).measure(group, options.scheduler, capacity)
        worker.reset_counters()
        if offload is not None:
            offload.reset_stats()
        logger.debug("steps are measured")
    recorder.capacity = CAPACITY if options.observe.trace else 0
    stats = StatsReporter(
        place,
        worker,
        pipeline,
        device=device,
        weight_bytes_read=checkpoint.bytes_read,
        recorder=recorder,
        offload=offload,
    )
    return RankParts(
        layout=layout,
        place=place,
        directory=directory,
        channel=links.channel,
        tp=tp,
        pipeline=pipeline,
        worker=worker,
        stats=stats,
        recorder=recorder,
        capacity=capacity,
        step_times=times,
        lends_cores=lends_cores,
        draft_model=draft_model,
        drafts=RemoteLink(links.drafts) if links.drafts is not None and group.rank == 0 else None,
    )


def has_compiled_preview(context: StageContext) -> bool:
    """Whether a preview of the head saves anything: the reference computes all of it and compares."""
    return not context.functions.matrices["vocabulary"].packing.startswith("reference")


def _gather_weight_bytes(group: RankGroup, model: nn.Module) -> tuple[int, ...]:
    """Bytes of the weights of each rank that has a place, by its number among all; 0 for others. Collective."""
    counts = group.comm.all_gather(torch.tensor([weight_bytes(model)]))
    by_rank = dict(zip(group.ranks, (int(count) for count in counts), strict=True))
    return tuple(by_rank.get(rank, 0) for rank in range(max(by_rank) + 1))


def prepare_providers(group: RankGroup, device: torch.device) -> list[Provider]:
    """Compile, once on every node, and load the functions that this rank can use; collective."""
    providers, is_first = make_providers(), group.is_first_on_node
    for turn in (True, False):
        with group.together():
            if turn == is_first:
                for provider in providers:
                    with compile_progress() as on_progress:
                        provider.prepare(device, on_progress)
    return providers


def cache_folder() -> Path | None:
    """Folder for what is kept between runs; None where this user has no home directory."""
    try:
        return compiler.default_cache()
    except compiler.NoCompiler:
        return None


@contextmanager
def memory_for(what: str, device: torch.device) -> Iterator[None]:
    """Turn running out of memory into a refusal; torch reports a CPU's as a plain RuntimeError.

    Raises:
        UserError: there is no room.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        reason = first_line(error)
        if type(error) is RuntimeError and "alloc" not in reason:
            raise
        hint = describe_limit() or "use more ranks, a smaller --dtype or a smaller --memory-utilization"
        raise UserError(f"{what} do not fit on {device} ({reason:.120}); {hint}") from None
