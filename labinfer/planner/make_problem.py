"""make_problem: the layout search problem for the options of a launch or a command."""

from __future__ import annotations

from collections.abc import Iterable

from labinfer.base.config import EngineOptions, ModelOptions
from labinfer.base.errors import UserError
from labinfer.base.option_fields import join
from labinfer.planner.cluster import Cluster
from labinfer.planner.objective import EngineLimits
from labinfer.planner.problem import Problem
from labinfer.planner.saved_plan import ROUNDINGS, room_options, rounding
from labinfer.planner.workload import (
    DEFAULT_OUTPUT,
    DEFAULT_PROMPT,
    CountTokens,
    RequestLengths,
    Workload,
    read_workload,
)

DEFAULT_LENGTH = 4096
"""Context length, in tokens, if neither --max-model-len nor the workload gives another."""


def make_problem(
    cluster: Cluster,
    options: EngineOptions,
    *,
    objective: str = "throughput",
    workload: str = "",
    first: str = "",
    max_position: int = 0,
    count_tokens: CountTokens | None = None,
) -> Problem:
    """The problem of the best layout on the machines of ``cluster``.

    Args:
        options: options of the launch; for its block size see ``Cluster.with_block_size``.
        workload: file for ``read_workload``; empty for requests of default lengths, shortened to the context.
        first: machine of rank 0; empty for any.
        max_position: longest context of the model; 0 if unknown.
        count_tokens: see ``read_workload``.

    Raises:
        UserError: the file is no workload or has requests that are too long, or no machine was probed with matching options.
    """
    options = cluster.with_block_size(options)
    requests = read_workload(workload, count_tokens=count_tokens) if workload else None
    longest = max((request.prompt + request.output for request in requests.requests), default=0) if requests else 0
    length = options.model.max_model_len or max(DEFAULT_LENGTH, longest)
    if max_position:
        length = min(length, max_position)
    requests = requests or _usual_requests(length)
    requests.check(length)
    limits = EngineLimits(
        max_model_len=length,
        max_num_seqs=options.scheduler.max_num_seqs,
        max_num_batched_tokens=options.scheduler.max_num_batched_tokens,
        chunked_prefill_size=options.scheduler.chunked_prefill_size,
        block_size=options.cache.tokens_per_block,
        memory_utilization=options.cache.memory_utilization,
        kept=options.scheduler.keep if options.scheduler.context_shift else None,
        max_context=0 if options.model.max_model_len else max_position,
        num_kv_blocks=options.cache.num_kv_blocks,
    )
    return Problem(
        cluster=cluster,
        request=requests.mean,
        limits=limits,
        objective=objective,
        first=first,
        dtypes=allowed_dtypes(cluster, options.model),
        options=tuple(room_options(options, limits.context).items()),
    )


def refuse_drafters(options: EngineOptions) -> None:
    """Refuse drafters with weights: cost files do not include the memory of drafters.

    Raises:
        UserError: ``options`` use a draft model or the MTP layer.
    """
    speculation = options.scheduler.speculative_config
    if speculation is not None and (speculation.model or options.scheduler.has_mtp):
        what = f"the draft model {speculation.model}" if speculation.model else "the MTP layer"
        raise UserError(
            f"--cluster files do not contain the memory of {what}; plan in a launch on the hosts themselves, or "
            "leave out --speculative-config"
        )


def refuse_draft_rank(options: EngineOptions, flag: str) -> None:
    """Refuse a ``draft_rank``: only an explicit layout (--ranks) names spare ranks.

    Raises:
        UserError: ``options`` have a ``draft_rank``; the message names ``flag``.
    """
    speculation = options.scheduler.speculative_config
    if speculation is not None and speculation.draft_rank:
        raise UserError(
            f"{flag} chooses the spare ranks itself; leave it or draft_rank {speculation.draft_rank} of "
            "--speculative-config out"
        )


def no_room(problem: Problem) -> UserError:
    """The error for a problem without a solution."""
    return UserError(
        f"the model fits no layout of {', '.join(machine.name for machine in problem.cluster.machines)} with a "
        f"context length of {problem.limits.max_model_len} tokens; add machines, or give a smaller "
        "--max-model-len, --dtype or --quantization"
    )


def allowed_dtypes(cluster: Cluster, model: ModelOptions) -> tuple[tuple[str, str], ...]:
    """Pairs of dtype and quantization that costs may have under --dtype and --quantization, in order of preference; empty for any.
    The order of --quantization takes precedence over that of --dtype.

    Raises:
        UserError: no machine was probed with an allowed pair, or the machines were probed in several quantizations and -q is not
            given.
    """
    probed = dict.fromkeys((costs.dtype, costs.quantization) for machine in cluster.machines for costs in machine.costs)
    if model.quantization == ModelOptions.quantization:
        if len({rounding(quantization) for _, quantization in probed}) > 1:
            raise UserError(
                f"machines were probed in {_name_forms(probed)}, and the planner never quantizes on its own; "
                "choose with -q, such as -q none,int8 to use int8 where needed"
            )
        if model.dtype == ModelOptions.dtype:
            return ()
    pairs = [
        pair
        for quantization in model.quantization
        for dtype in model.dtype
        for pair in probed
        if dtype in ("auto", pair[0]) and _is_asked_for(pair[1], quantization, len(model.quantization) == 1)
    ]
    if not pairs:
        raise UserError(
            f"--dtype {join(model.dtype)} --quantization {join(model.quantization)}: machines were probed in "
            f"{_name_forms(probed)} only; also probe with these flags"
        )
    return tuple(dict.fromkeys(pairs))


def _is_asked_for(name: str, quantization: str, is_only: bool) -> bool:
    """Whether ``quantization``, a value of --quantization, allows costs measured with the quantization ``name``.
    ``auto`` allows all costs if it is the only value; together with other values it allows only weights that are not
    quantized on load."""
    if quantization == "auto":
        return is_only or rounding(name) not in ROUNDINGS
    return rounding(name) == quantization


def _name_forms(forms: Iterable[tuple[str, str]]) -> str:
    return " and ".join(f"{dtype} ({quantization})" for dtype, quantization in forms)


def _usual_requests(length: int) -> Workload:
    """Requests of the default lengths, scaled down to a context of ``length`` tokens."""
    share = min(1.0, length / (DEFAULT_PROMPT + DEFAULT_OUTPUT))
    prompt = max(1, int(DEFAULT_PROMPT * share))
    return Workload((RequestLengths(prompt=prompt, output=max(1, min(DEFAULT_OUTPUT, length - prompt))),))
