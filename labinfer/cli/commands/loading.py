"""load: loads a model on the ranks of this launch, with a progress line and a table of the ranks."""

from __future__ import annotations

import logging

from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.base.rank_stats import StepTimes
from labinfer.base.standard_error import terminal_columns, write_error
from labinfer.cli.commands.layout import format_layout, layout_rows
from labinfer.cli.commands.session import Session
from labinfer.comm.spmd.machine import resident_memory
from labinfer.observe.progress_line import TransferLine
from labinfer.observe.table import format_bytes

logger = logging.getLogger(__name__)


def load(session: Session, options: EngineOptions | None = None, others: tuple[LLM, ...] = ()) -> LLM:
    """Load this rank's shard of a model; collective.

    Args:
        options: engine options; None for those of the session.
        others: see ``LLM.from_options``.

    Raises:
        UserError: the model or the layout is invalid; on every rank.
    """
    line, is_rank0 = TransferLine("loading weights"), session.group.rank == 0

    def on_progress(done: int, total: int) -> None:
        if is_rank0:
            line.show(done, total)

    try:
        return LLM.from_options(session.group, options or session.options, on_progress, others)
    finally:
        line.close()


def announce(models: dict[str, LLM]) -> None:
    """Print a table of the ranks and the capacity of each KV cache, if the log level is at least ``info``; rank 0 only.

    Args:
        models: models by served name.
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    rows: list[tuple] = []
    for name, llm in models.items():
        logger.info("model %s: %s", name, llm.directory)
        kv_tokens = list(map(llm.layout.tokens_in, llm.capacity.blocks_of_rank))
        metas = map(llm.layout.meta, llm.layout.topology.places)
        states = [llm.capacity.sizes.num_states if meta.bytes_per_sequence else None for meta in metas]
        rows += [(name, *row) for row in layout_rows(llm.layout, llm.group.everyone, kv_tokens, states)]
    first = ("model",) * (len(models) > 1)
    write_error(format_layout([row[1 - len(first) :] for row in rows], first, terminal_columns()) + "\n")
    group, placed = llm.group, llm.layout.topology.placed_ranks
    drafting = llm.layout.draft_devices
    if spare := [str(rank) for rank in group.ranks if rank not in placed and rank not in drafting]:
        logger.info("spare rank%s: %s", "s" * (len(spare) > 1), ", ".join(spare))
    for rank in drafting:
        logger.info("draft model on rank %d: %s", rank, llm.options.scheduler.speculative_config.model)
    for name, llm in models.items():
        _announce_capacity(f" of {name}" if len(models) > 1 else "", llm)
    _announce_memory([*models.values()])


def _announce_memory(llms: list[LLM]) -> None:
    """Log the memory of rank 0: weights, KV cache, and the rest of the process. Pages of the KV cache become resident at their first use."""
    if any(llm.layout.devices[llm.place.rank].type != "cpu" for llm in llms):
        return
    weights = cache = 0
    for llm in llms:
        sizes, draft = llm.capacity.sizes, llm.draft_model
        weights += llm.layout.weight_bytes(llm.place)
        cache += llm.layout.cache_bytes(llm.place, sizes.num_blocks, sizes.num_window_blocks)
        if draft is not None:
            weights += draft.weight_bytes
            cache += draft.sizes.num_blocks * draft.block_bytes
    logger.info(
        "memory of rank 0: %s of weights, %s for the KV cache (resident as it fills), %s for the rest of the process",
        *map(format_bytes, (weights, cache, max(0, resident_memory() - weights))),
    )


def _announce_capacity(whose: str, llm: LLM) -> None:
    capacity, sizes, layout = llm.capacity, llm.capacity.sizes, llm.layout
    logger.info(
        "KV cache%s: %d blocks of %d tokens per rank (%s in %s on rank 0); context length %d",
        whose,
        sizes.num_blocks,
        layout.block_size,
        format_bytes(layout.cache_bytes(llm.place, sizes.num_blocks, sizes.num_window_blocks)),
        str(layout.kv_dtype(llm.place)).removeprefix("torch."),
        sizes.max_model_len,
    )
    if capacity.captured_bytes:
        logger.info(
            "captured decode graphs%s: up to %s on rank 0, in addition to the KV cache",
            whose,
            format_bytes(capacity.captured_bytes),
        )
    if windows := capacity.describe_windows(layout):
        logger.info("KV cache%s: %s", whose, windows)
    if (draft := llm.draft_model) is not None:
        logger.info(
            "draft model%s on rank 0: %s, %s of weights, %d KV blocks (%s), %d recurrent states (%s); context length %d",
            whose,
            draft.directory,
            format_bytes(draft.weight_bytes),
            draft.sizes.num_blocks,
            format_bytes(draft.sizes.num_blocks * draft.block_bytes),
            draft.sizes.num_states,
            format_bytes(draft.state_bytes),
            draft.sizes.max_model_len,
        )
    if limit := capacity.describe_limit(layout.topology.places):
        logger.info("KV cache%s: %s", whose, limit)
    if sizes.num_states:
        logger.info(
            "recurrent states%s: %d slots (%s each on rank 0) for running sequences and prefix-cache snapshots",
            whose,
            sizes.num_states,
            format_bytes(layout.meta(llm.place).bytes_per_sequence),
        )
    if sizes.num_host_blocks:
        states = f", {sizes.num_host_states} states" if sizes.num_states else ""
        windows = f", {sizes.num_host_window_blocks} for sliding-window layers" if sizes.window else ""
        logger.info("swap space in host memory%s: %d blocks%s%s", whose, sizes.num_host_blocks, windows, states)
    if llm.spec.step_times is not None:
        logger.info("measured%s: %s", whose, _describe_times(llm.spec.step_times))


def _describe_times(times: StepTimes) -> str:
    def slowest(by_stage: list[list[float]]) -> str:
        return ", ".join(
            f"{max(of[i] for of in by_stage) * 1e3:.1f} ms for {size}" for i, size in enumerate(times.sizes)
        )

    text = f"step time of the slowest stage: {slowest(times.by_stage)} decoding sequences"
    text += f" ({slowest(times.alone)} while the others are idle)" if times.alone else ""
    text += f", stage-to-stage transfer {times.hop * 1e3:.2f} ms" if times.hop else ""
    text += f", swapping a KV block {times.swapped_block * 1e3:.2f} ms" if times.swapped_block else ""
    return text + (f", swapping a recurrent state {times.swapped_state * 1e3:.2f} ms" if times.swapped_state else "")
