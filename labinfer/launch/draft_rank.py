"""The draft rank: a spare rank that runs the draft model, and rank 0's channel to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.plan import DraftAnswer, DraftRequest, EndRun
from labinfer.comm.control import ControlChannel
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.spmd.devices import torch_device
from labinfer.comm.spmd.machine import free_memory
from labinfer.functions.provider import Provider
from labinfer.launch.communicators import Communicators
from labinfer.launch.draft_model import LoadedDraftModel, load_draft_model
from labinfer.launch.layout.layout import Layout
from labinfer.launch.out_of_memory import memory_for
from labinfer.launch.tune import prepare_providers
from labinfer.weights.weight_cache import WeightCache
from labinfer.worker.step_graphs import CAPTURED_BYTES, find_capture


class RemoteDraftChannel:
    """Rank 0's channel to the draft rank; see ``engine/remote_drafts.py``.

    Args:
        channel: control channel to the draft rank only.
    """

    def __init__(self, channel: ControlChannel):
        self._channel = channel
        self._awaits = False

    def ask(self, request: DraftRequest) -> None:
        """Send a request without waiting for its answer."""
        self._channel.broadcast(request)
        self._awaits = True

    def take(self) -> DraftAnswer | None:
        """Wait for the answer to the last request; None if it was already taken or no request was sent."""
        if not self._awaits:
            return None
        self._awaits = False
        (answer,) = self._channel.collect("the drafts")
        return answer

    def end_run(self) -> None:
        """Take a pending answer and tell the draft rank that the run has ended."""
        self.take()
        self._channel.broadcast(EndRun([]))

    def close(self) -> None:
        """Wait until all sent messages have arrived."""
        self._channel.close()


@dataclass(frozen=True)
class DraftRank:
    """Draft model and control channel of the draft rank."""

    model: LoadedDraftModel
    channel: ControlChannel

    def follow(self, answer: Callable[[DraftRequest], DraftAnswer]) -> None:
        """Answer requests until rank 0's run ends. Replies have no timeout: an idle rank 0 may take an answer long after it is ready."""
        while isinstance(request := self.channel.receive("requests for drafts"), DraftRequest):
            self.channel.reply(answer(request), "drafts", math.inf)

    def close(self) -> None:
        """Free the weights and the KV cache."""
        self.model.close()


def build_spare_rank(
    group: RankGroup, options: EngineOptions, layout: Layout, comms: Communicators
) -> DraftRank | None:
    """Build a spare rank: a ``DraftRank`` if it holds the draft model, else None. Collective over the spare ranks.

    Raises:
        UserError: see ``build_draft_rank``.
    """
    name = layout.draft_devices.get(group.rank)
    group.progress.label = f"rank {group.rank} ({'spare' if name is None else 'drafts'})"
    if name is None:
        return None
    device = torch_device(name)
    with memory_for("the draft model", device):
        return build_draft_rank(
            group,
            options,
            layout,
            comms.drafts,
            providers=prepare_providers(comms.placed, device, reproducible=options.model.reproducible),
            weight_cache=WeightCache.from_home(options.cache.weight_cache_size),
        )


def build_draft_rank(
    group: RankGroup,
    options: EngineOptions,
    layout: Layout,
    channel: ControlChannel,
    *,
    providers: list[Provider],
    weight_cache: WeightCache | None,
) -> DraftRank:
    """Load the draft model on this spare rank and allocate its KV blocks.

    Args:
        layout: layout of the target model.

    Raises:
        UserError: the draft model is not found, cannot draft for the target model, or does not fit.
    """
    name = options.scheduler.speculative_config.model
    model = load_draft_model(group, options, layout, providers=providers, weight_cache=weight_cache)
    device, scheduling = torch_device(layout.draft_devices[group.rank]), options.scheduler
    free = free_memory(device, options.cache.num_kv_blocks) // layout.sharing_device(group.rank, group.everyone)
    if device.type == "cpu" and weight_cache is not None:  # the system counts memory-mapped files as available memory
        free -= weight_cache.mapped_bytes()
    capture = find_capture(providers, 1)
    free -= model.state_bytes + (CAPTURED_BYTES if capture is not None else 0)
    useful, given = model.layout.useful_blocks(scheduling.max_num_seqs), options.cache.num_kv_blocks
    num_blocks = given or int(free * options.cache.memory_utilization) // model.block_bytes
    if num_blocks < model.layout.least_blocks:
        raise UserError(
            f"the draft model {name} has too little memory for a KV cache ({max(0, free) >> 20} MiB free); raise "
            "--memory-utilization or choose another draft_rank"
        )
    if given and (needed := min(given, useful) * model.block_bytes) > free:
        raise UserError(
            f"--num-kv-blocks {given} needs {needed >> 20} MiB for the draft model {name}, but "
            f"{max(0, free) >> 20} MiB are free; give less, or choose another draft_rank"
        )
    model.make_cache(num_blocks, scheduling.max_num_seqs, capture)
    return DraftRank(model, channel)
