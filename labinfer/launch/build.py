"""Construction of a rank: communicators, functions, weights, KV cache, model runner and worker, in this order."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from labinfer.base.config import EngineOptions
from labinfer.comm.control import ControlChannel
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.spmd.devices import torch_device, use_device
from labinfer.comm.spmd.machine import return_freed_memory
from labinfer.launch.answer_files import AnswerFiles, identify_answer_files, setting_stamps
from labinfer.launch.communicators import Communicators, connect, make_communicators
from labinfer.launch.core_sharing import share_cores
from labinfer.launch.draft_model import load_draft_model_beside
from labinfer.launch.draft_rank import DraftRank, RemoteDraftChannel, build_spare_rank
from labinfer.launch.energy_counters import open_energy_meter
from labinfer.launch.expert_offload import offload_experts
from labinfer.launch.find_model import find_model
from labinfer.launch.layout.kv_capacity import agree_on_blocks
from labinfer.launch.layout.layout import Layout, check_context_shift, make_layout
from labinfer.launch.load_stage import gather_weight_bytes, load_stage, open_stage
from labinfer.launch.measure.startup_profiler import StartupProfiler
from labinfer.launch.out_of_memory import memory_for
from labinfer.launch.rank_runtime import RankRuntime
from labinfer.launch.runner import make_runner
from labinfer.launch.step_sinks import open_sinks
from labinfer.launch.tune import choose_functions, prepare_providers
from labinfer.models.config import ModelConfig
from labinfer.observe.recorder import CAPACITY, Recorder
from labinfer.weights.weight_cache import WeightCache
from labinfer.worker.mtp_drafter import attach_mtp_drafter
from labinfer.worker.stats_reporter import StatsReporter
from labinfer.worker.step_graphs import CAPTURED_BYTES, find_capture
from labinfer.worker.worker import Worker

logger = logging.getLogger(__name__)


def build_rank(
    group: RankGroup,
    options: EngineOptions,
    on_progress: Callable[[int, int], None],
    channel: ControlChannel | None = None,
    shares_channel: bool = False,
) -> tuple[RankRuntime | DraftRank | None, AnswerFiles]:
    """Build this rank's runtime and load its weights; collective over the group.

    Returns the runtime (None on a spare rank without the draft model), and the files that the rank read. The caller must call
    ``check_loaded`` on the files.

    Args:
        channel: control channel of another model of this group, to be shared; None on a spare rank.
        shares_channel: whether another model owns the control channel; if not, this call makes one.

    Raises:
        CollectiveError: the layout, the checkpoint or the memory is unsuitable on any rank.
        FilesChanged: the config was written to during the start.
    """
    config_stamps: dict[str, str] = {}
    directory, config = find_model(group, options, lambda path: config_stamps.update(setting_stamps(path)))
    with group.raise_on_all_ranks():
        layout = make_layout(options, config, group.everyone)
        if group.rank in layout.all_devices:
            # before process groups and providers, which take the current device
            use_device(layout.all_devices[group.rank])
    files = identify_answer_files(group, options, directory, layout)
    files.check_read(config_stamps)
    may_share = options.parallel.transport == "auto"
    comms = make_communicators(group, layout, channel, shares_channel=shares_channel, may_share=may_share)
    placed = layout.topology.placed_ranks
    # Spare ranks wait here and receive the placed ranks' errors.
    with group.raise_on_all_ranks() if len(placed) < group.size else nullcontext():
        if group.rank in placed:
            return build_placed(comms, options, config, directory, layout, on_progress=on_progress), files
        return build_spare_rank(group, options, layout, comms), files


def build_placed(
    comms: Communicators,
    options: EngineOptions,
    config: ModelConfig,
    directory: Path,
    layout: Layout,
    *,
    on_progress: Callable[[int, int], None],
    is_whole: bool = True,
) -> RankRuntime:
    """Build the runtime of a placed rank (one with a part of the model); collective over the placed ranks.

    Args:
        is_whole: whether the layout has all layers of the checkpoint. A probe loads only some of them.
    """
    group, scheduling = comms.placed, options.scheduler
    topology, place = layout.topology, layout.topology.place(group.rank)
    device = torch_device(layout.devices[group.rank])
    group.progress.label = str(place)
    tp, pipeline = connect(comms, layout, place, may_share=options.parallel.transport == "auto")

    weight_cache = WeightCache.from_home(options.cache.weight_cache_size)
    with group.raise_on_all_ranks():
        check_context_shift(options, layout, place)
        checkpoint = open_stage(group, options, directory, layout, cache=weight_cache, is_whole=is_whole)
    providers = prepare_providers(group, device, reproducible=options.model.reproducible)
    share_cores(group, comms.machine, layout, place, providers)
    functions, kernels = choose_functions(group, options, layout, place, providers)
    with group.raise_on_all_ranks(), memory_for("the weights", device):
        context = layout.stage_context(place, tp, functions)
        context, offload = offload_experts(context, layout, providers)
        model = load_stage(
            checkpoint,
            options,
            context,
            layout,
            place,
            directory=directory,
            providers=providers,
            cache=weight_cache,
            on_progress=on_progress,
        )
    layout = dataclasses.replace(layout, loaded_bytes=gather_weight_bytes(group, model))
    with group.raise_on_all_ranks(), memory_for("the draft model's weights", device):
        draft_model = load_draft_model_beside(group, options, layout, providers=providers, weight_cache=weight_cache)
        # Return the memory freed after tuning, decoding and packing, on all ranks before any rank counts its free memory.
        return_freed_memory()

    capture = find_capture(providers, tp.size)
    captured_bytes = 0 if capture is None else CAPTURED_BYTES * (1 if draft_model is None else 2)
    capacity = agree_on_blocks(group, options, layout, place, draft_model=draft_model, captured_bytes=captured_bytes)
    sizes = capacity.sizes
    layout = dataclasses.replace(layout, max_model_len=sizes.max_model_len)
    with group.raise_on_all_ranks(), memory_for("the KV cache", device):
        runner = make_runner(
            model,
            layout,
            place,
            sizes,
            functions=context.functions,
            capture=capture,
            max_num_batched_tokens=scheduling.max_num_batched_tokens,
        )
        if draft_model is not None:
            draft_model.make_cache(sizes.num_blocks, scheduling.max_num_seqs, capture)

    attach_mtp_drafter(runner, device)
    with group.raise_on_all_ranks():
        sinks = open_sinks(options.observe.step_sink, place)
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
    stats = StatsReporter(
        place,
        worker,
        pipeline,
        device=device,
        weight_bytes_read=checkpoint.bytes_read,
        recorder=recorder,
        energy=open_energy_meter(layout, group.rank, group.everyone),
        offload=offload,
    )
    profiler, step_times = StartupProfiler(layout, place, worker, pipeline), None
    if profiler.is_needed(scheduling, sizes):
        step_times = profiler.measure(group, scheduling, sizes)
        stats.reset()
    recorder.capacity = CAPACITY if options.observe.trace else 0
    return RankRuntime(
        layout=layout,
        place=place,
        directory=directory,
        kernels=kernels,
        channel=comms.channel,
        tp=tp,
        pipeline=pipeline,
        worker=worker,
        stats=stats,
        recorder=recorder,
        capacity=capacity,
        step_times=step_times,
        draft_model=draft_model,
        drafts=RemoteDraftChannel(comms.drafts) if comms.drafts is not None and group.rank == 0 else None,
    )
