"""``launch.py plan``: shows which rank would hold which layers, and whether they fit, without loading anything."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from labinfer.base.errors import ExitStatus
from labinfer.base.standard_error import terminal_columns
from labinfer.cli.commands.session import Session
from labinfer.comm.communicator import name_ranks
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.spmd.devices import DeviceName, torch_device
from labinfer.comm.spmd.machine import RankInfo, free_memory
from labinfer.engine.cache_capacity import BlockCounts, CacheRoom, pool_rooms, sum_fields
from labinfer.launch.draft_model import plan_draft_model
from labinfer.launch.find_model import find_model
from labinfer.launch.layout.draft_layout import draft_options
from labinfer.launch.layout.kv_capacity import count_fitting_blocks, describe_windows
from labinfer.launch.layout.layout import Layout, make_layout
from labinfer.launch.mtp_check import check_mtp
from labinfer.launch.providers import describe_device
from labinfer.observe.output_file import STANDARD, OutputFile
from labinfer.observe.table import format_bytes, format_table
from labinfer.planner.options import PlanOptions
from labinfer.weights.model_files import open_model
from labinfer.worker.step_graphs import CAPTURED_BYTES

HEADER = (
    *("rank", "host", "device", "stage", "tp", "layers", "dtype", "weights"),
    *("KV/token", "KV tokens", "state/seq", "states"),
)
"""Columns of the table; the last four are KV bytes per token, KV capacity in tokens, state bytes per sequence, and state slots."""
STATE_COLUMNS = HEADER[-2:]
"""Columns that only models with recurrent layers need."""

REPLICATED = (
    "each tensor-parallel rank caches the full MLA latent of every token: a larger --tensor-parallel-size does not reduce KV cache "
    "memory, more pipeline stages do"
)


def run(session: Session, own: PlanOptions) -> int:
    """Print the layout as a table on rank 0, and explain the memory needs of ranks that have too little memory. A single process
    may plan for any number of ranks, as if they all ran on this machine."""
    if own.auto:
        from labinfer.cli.commands.auto_plan import run_here

        return run_here(session, own)
    group, status = session.join(), ExitStatus.OK
    directory, config = find_model(group, session.options)
    everyone = group.everyone
    parallel, num_kv_blocks = session.options.parallel, session.options.cache.num_kv_blocks
    if group.size == 1:
        tp = parallel.tensor_parallel_size
        world_size = sum(tp) if len(tp) > 1 else tp[0] * max(1, parallel.pipeline_parallel_size, len(parallel.layers))
        speculation = session.options.scheduler.speculative_config
        named = (*parallel.ranks, speculation.draft_rank if speculation else 0)
        numbers = range(max(named) + 1 if parallel.ranks else world_size)
        everyone = [msgspec.structs.replace(group.everyone[0], rank=rank, local_rank=rank) for rank in numbers]
    with group.raise_on_all_ranks():
        if config.mtp is not None:
            check_mtp(session.options, config, directory, open_model(directory).open_weights().names)
        layout = make_layout(session.options, config, everyone)
        draft = _plan_draft_model(session, layout, everyone) if group.rank == 0 else None
        on_rank0 = None if layout.draft_devices else draft
        if group.size == 1:
            free = {rank: free_memory(torch_device(name), num_kv_blocks) for rank, name in layout.all_devices.items()}
        else:
            free = _gather_free(group, layout, num_kv_blocks)
        if group.rank == 0:
            of_rank = {
                rank: RankBytes.make(layout, everyone, rank, free=free[rank], draft=on_rank0 if rank == 0 else None)
                for rank in layout.devices
            }
            rooms = _estimate_rooms(session, layout, everyone, of_rank)
            window = max(layout.meta(place).window for place in layout.topology.places)
            fitting, needs = count_fitting_blocks(session.options, layout, rooms, window)
            blocks, num_seqs = fitting.capped(session.options.planned_blocks), session.options.scheduler.max_num_seqs
            states = [
                room.num_states(num_seqs) if layout.meta(layout.topology.place(rank)).bytes_per_sequence else None
                for rank, room in zip(of_rank, rooms, strict=True)
            ]
            kv_tokens = list(map(layout.tokens_in, blocks.of_rank))
            title = _describe_plan(session.options.model.model, layout, is_alone=group.size == 1)
            rows = layout_rows(layout, everyone, kv_tokens, states)
            table = format_layout(rows, max_width=terminal_columns(sys.stdout))
            num_tokens = layout.tokens_in(blocks.num_blocks)
            least = f"KV cache: {blocks.num_blocks} blocks ({num_tokens} tokens), limited by the smallest rank"
            if slots := [count for count in states if count is not None]:
                least += f"; {min(slots)} slots for recurrent states"
            replicated = any(
                place.tp_size > 1 and layout.meta(place).is_cache_replicated for place in layout.topology.places
            )
            notes = [REPLICATED] if replicated else []
            if blocks.num_window_blocks:
                notes.append(describe_windows(needs.window, blocks.num_window_blocks, num_tokens, blocks.gain))
            if captured := max(own.captured for own in of_rank.values()):
                notes.append(f"plus up to {format_bytes(captured)} per rank for captured decode graphs")
            if layout.config.mtp is not None:
                meta = layout.meta(layout.topology.places[-1])
                notes.append(
                    f"the last stage includes the MTP layer: {format_bytes(meta.mtp_bytes)} of weights per rank, "
                    f"{format_bytes(meta.mtp_bytes_per_token)} of KV cache per token"
                )
            if draft is not None:
                place = draft.topology.place(0)
                holds, beside = "rank 0 also holds the draft model", ", in addition to the model's"
                for rank in layout.draft_devices:
                    holds, beside = f"rank {rank} holds the draft model", ""
                notes.append(
                    f"{holds}: {format_bytes(draft.weight_bytes(place))} of weights, "
                    f"{format_bytes(draft.meta(place).bytes_per_token)} of KV cache per token{beside}"
                )
                if state := draft.meta(place).bytes_per_sequence:
                    notes[-1] += f", {format_bytes(state)} of state per sequence"
            least_bytes = {rank: _least_bytes(session, layout, rank, own, blocks) for rank, own in of_rank.items()}
            for rank in layout.draft_devices:
                of_rank[rank] = RankBytes.make_drafting(layout, everyone, rank, free=free[rank], draft=draft)
                least_bytes[rank] = _least_draft_bytes(session, of_rank[rank], draft)
            complaints = [
                _describe_shortfall(
                    session,
                    layout,
                    everyone,
                    ranks,
                    RankBytes.sum(of_rank[rank] for rank in ranks),
                    least=sum(least_bytes[rank] for rank in ranks),
                )
                for ranks in _ranks_by_memory(layout, everyone, of_rank)
            ]
            OutputFile(STANDARD).write(
                "\n".join([title, "", table, "", least, *notes, *filter(None, complaints)]) + "\n"
            )
            if any(complaints):
                status = ExitStatus.SOME_FAILED
    group.close()
    return status


def layout_rows(
    layout: Layout, everyone: list[RankInfo], kv_tokens: list[int], states: list[int | None]
) -> list[tuple]:
    """Rows of the table, one for each rank of the layout, with the columns in ``HEADER``.

    Args:
        kv_tokens: KV capacity of each rank, in tokens.
        states: state slots of each rank; None for a rank without recurrent layers.
    """
    rows = []
    for place, tokens, slots in zip(layout.topology.places, kv_tokens, states, strict=True):
        begin, end = layout.topology.layers[place.stage]
        meta = layout.meta(place)
        form, quantization = str(layout.dtype(place)).removeprefix("torch."), layout.quantization_name(place)
        if quantization != "none":
            form += f", {quantization}"
        rows.append(
            (
                place.rank,
                everyone[place.rank].node,
                str(layout.devices[place.rank]),
                place.stage,
                place.tp_rank,
                f"{begin}-{end - 1}",
                form,
                format_bytes(layout.weight_bytes(place)),
                format_bytes(meta.bytes_per_token),
                tokens,
                "-" if slots is None else format_bytes(meta.bytes_per_sequence),
                "-" if slots is None else slots,
            )
        )
    return rows


def format_layout(rows: list[tuple], first: tuple[str, ...] = (), max_width: int = 0) -> str:
    """Table of ``layout_rows``. To fit a terminal of 80 columns, it has the columns of states only for models with recurrent
    layers, and the column of hosts only if there are several hosts.

    Args:
        rows: rows of ``layout_rows``, each preceded by values for the columns ``first``.
        first: titles of columns that precede those in ``HEADER``.
        max_width: see ``format_table``.
    """
    header = (*first, *HEADER)
    left_out = {*STATE_COLUMNS} if all(row[-1] == "-" for row in rows) else set()
    if len({row[header.index("host")] for row in rows}) == 1:
        left_out.add("host")
    shown = [column for column, name in enumerate(header) if name not in left_out]
    return format_table([header[i] for i in shown], [[row[i] for i in shown] for row in rows], max_width)


def _describe_plan(model: str, layout: Layout, is_alone: bool) -> str:
    num_stages, num_ranks = layout.topology.num_stages, layout.topology.num_places
    title = f"{model} in {num_stages} stage{'s' * (num_stages > 1)} on {num_ranks} rank{'s' * (num_ranks > 1)}"
    return title + ", as if all ranks were on this machine" * (is_alone and num_ranks > 1)


def _gather_free(group: RankGroup, layout: Layout, num_kv_blocks: int) -> dict[int, int]:
    device = torch_device(layout.all_devices.get(group.rank, DeviceName("cpu")))
    with group.raise_on_all_ranks():
        mine = torch.tensor([free_memory(device, num_kv_blocks)])
    return dict(zip(group.ranks, map(int, group.comm.all_gather(mine)), strict=True))


def _plan_draft_model(session: Session, layout: Layout, everyone: list[RankInfo]) -> Layout | None:
    """Compute the layout of the draft model; None if there is no draft model."""
    speculation = session.options.scheduler.speculative_config
    if speculation is None or not speculation.model:
        return None
    own = draft_options(session.options, speculation.model, layout)
    return plan_draft_model(own, session.environment, layout, everyone)[1]


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Memory of a rank in bytes: the part of the device's free memory that the rank gets, and the memory that its shard of the
    model and the draft model need."""

    free: int
    weights: int
    captured: int
    """Maximum memory of captured steps (CUDA graphs or their CPU counterpart), in bytes."""
    draft_block: int = 0
    """Bytes of a KV block of the draft model."""
    draft_state: int = 0
    """Bytes of a sequence's recurrent state in the draft model."""

    @property
    def room(self) -> int:
        """Bytes that remain for KV blocks and recurrent states; may be negative."""
        return self.free - self.weights - self.captured

    @classmethod
    def sum(cls, ranks: Iterable[RankBytes]) -> RankBytes:
        """Sum over ranks that share one memory."""
        return sum_fields(cls, ranks)

    @classmethod
    def make(cls, layout: Layout, everyone: list[RankInfo], rank: int, *, free: int, draft: Layout | None) -> RankBytes:
        """Compute the memory needs of one rank of a layout.

        Args:
            free: free bytes of the rank's device; other ranks may share them.
            draft: layout of the draft model if the rank also holds it; else None.
        """
        weights = layout.weight_bytes(layout.topology.place(rank))
        tp_size = layout.topology.place(rank).tp_size
        captured, more = CAPTURED_BYTES * describe_device(layout.devices[rank].type).captures(tp_size), {}
        if draft is not None:
            weights += draft.weight_bytes(draft.topology.place(0))
            captured *= 2
            more = _draft_bytes(draft)
        return cls(free=free // layout.sharing_device(rank, everyone), weights=weights, captured=captured, **more)

    @classmethod
    def make_drafting(
        cls, layout: Layout, everyone: list[RankInfo], rank: int, *, free: int, draft: Layout
    ) -> RankBytes:
        """Compute the memory needs of a rank that holds only the draft model; see ``make``."""
        return cls(
            free=free // layout.sharing_device(rank, everyone),
            weights=draft.weight_bytes(draft.topology.place(0)),
            captured=CAPTURED_BYTES * describe_device(layout.draft_devices[rank].type).captures(1),
            **_draft_bytes(draft),
        )


def _draft_bytes(draft: Layout) -> dict[str, int]:
    """Fields of ``RankBytes`` for a draft model: bytes of a KV block, and bytes of the recurrent state of a sequence."""
    place = draft.topology.place(0)
    return {"draft_block": draft.block_bytes(place), "draft_state": draft.meta(place).bytes_per_sequence}


def _estimate_rooms(
    session: Session, layout: Layout, everyone: list[RankInfo], of_rank: Mapping[int, RankBytes]
) -> list[CacheRoom]:
    """Estimate the memory for KV cache and recurrent states of each rank. Ranks that share one memory also share what remains of
    it."""
    used, place_of = session.options.cache.memory_utilization, layout.topology.place
    rooms = [layout.cache_room(place_of(rank), int(own.room * used), own.draft_block) for rank, own in of_rank.items()]
    return pool_rooms(rooms, [layout.memory(rank, everyone) for rank in of_rank])


def _ranks_by_memory(layout: Layout, everyone: list[RankInfo], ranks: Iterable[int]) -> list[list[int]]:
    """Group ``ranks`` by the memory that they share. A rank that holds only the draft model is a group by itself."""
    by_memory: dict[Hashable, list[int]] = {}
    for rank in ranks:
        name = rank if rank in layout.draft_devices else layout.memory(rank, everyone)
        by_memory.setdefault(name, []).append(rank)
    return list(by_memory.values())


def _least_bytes(session: Session, layout: Layout, rank: int, own: RankBytes, blocks: BlockCounts) -> int:
    """Minimum bytes that the KV cache and recurrent states of a rank in the layout need."""
    cache, place = session.options.cache, layout.topology.place(rank)
    num_blocks, num_window_blocks = layout.least_blocks, 0
    if cache.num_kv_blocks:
        num_blocks, num_window_blocks = cache.num_kv_blocks, blocks.num_window_blocks
    least = layout.cache_bytes(place, num_blocks, num_window_blocks) + num_blocks * own.draft_block
    return least + layout.meta(place).bytes_per_sequence + own.draft_state


def _least_draft_bytes(session: Session, own: RankBytes, draft: Layout) -> int:
    """Minimum bytes of the KV cache and recurrent states of a rank that holds only the draft model. Such a rank allocates at most
    the blocks that drafts for ``max_num_seqs`` sequences can use."""
    most = draft.useful_blocks(session.options.scheduler.max_num_seqs)
    num_blocks = min(session.options.cache.num_kv_blocks or draft.least_blocks, most)
    return num_blocks * own.draft_block + own.draft_state


def _describe_shortfall(
    session: Session, layout: Layout, everyone: list[RankInfo], ranks: Sequence[int], own: RankBytes, *, least: int
) -> str:
    """Text with the memory needs of ranks that have too little memory; empty if their memory suffices.

    Args:
        ranks: ranks that share one memory.
        own: memory needs, summed over ``ranks``.
        least: minimum bytes of KV cache and recurrent states, summed over ``ranks``.
    """
    cache, num_sharing = session.options.cache, layout.sharing_device(ranks[0], everyone)
    used = 1.0 if cache.num_kv_blocks else cache.memory_utilization
    if int(max(0, own.room) * used) >= least:
        return ""
    who, whose = (f"{name_ranks(ranks)} have", "their") if len(ranks) > 1 else (f"{name_ranks(ranks)} has", "its")
    shared = ""
    if num_sharing > len(ranks):
        total = format_bytes(own.free * num_sharing // len(ranks))
        shared = f", {whose} share of {total} for {num_sharing} ranks"
    hint = "use more ranks, or a smaller --dtype or --quantization"
    if ranks[0] in layout.draft_devices:
        hint = "choose another draft_rank, or a smaller draft model"
    if cache.num_kv_blocks:
        hint = f"give --num-kv-blocks less than {cache.num_kv_blocks}, or leave it out"
    least += own.captured
    return (
        f"{who} too little memory: {format_bytes(own.weights)} of weights and at least {format_bytes(least)} of KV cache, states and "
        f"captured graphs need {format_bytes(own.weights + least)}, but {format_bytes(own.free)} are free on {layout.all_devices[ranks[0]]}{shared}; "
        f"{hint}"
    )
