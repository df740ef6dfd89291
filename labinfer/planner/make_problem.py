"""make_problem: the question to the search that the options of a start or of a command stand for."""

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
"""Tokens of a context where neither --max-model-len nor the workload says more."""


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
    """The question for the best layout of these machines.

    Args:
        workload: file of ``read_workload``; empty for requests of the usual lengths, as far as the context goes.
        first: machine of rank 0; empty for any.
        max_position: longest context of the model; 0 where it is not known.
        count_tokens: see ``read_workload``.

    Raises:
        UserError: the file is no workload or has requests that are too long, or no machine was probed as the options say.
    """
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
        block_size=options.cache.block_size,
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
    """Refuse what drafts with weights, whose bytes are not in files of costs.

    Raises:
        UserError: a draft model or the model's MTP layer is to draft.
    """
    speculation = options.scheduler.speculative_config
    if speculation is not None and (speculation.model or options.scheduler.has_mtp):
        what = f"the draft model {speculation.model}" if speculation.model else "the MTP layer"
        raise UserError(
            f"files of --cluster do not have the memory of {what}; plan in a launch on the machines themselves, which counts it, or "
            "leave out --speculative-config"
        )


def refuse_draft_rank(options: EngineOptions, flag: str) -> None:
    """Refuse a draft model on a spare rank, which only a layout that is given leaves free.

    Raises:
        UserError: there is to be one; it names ``flag``.
    """
    speculation = options.scheduler.speculative_config
    if speculation is not None and speculation.draft_rank:
        raise UserError(
            f"{flag} says which ranks are spare: draft_rank {speculation.draft_rank} of --speculative-config goes with --ranks; leave "
            "one of them out"
        )


def no_room(problem: Problem) -> UserError:
    """The error of a question that has no answer."""
    return UserError(
        f"the model fits on no layout of {', '.join(machine.name for machine in problem.cluster.machines)} with room for a "
        f"request of {problem.limits.max_model_len} tokens; add machines, or give a smaller --max-model-len, --dtype or --quantization"
    )


def allowed_dtypes(cluster: Cluster, model: ModelOptions) -> tuple[tuple[str, str], ...]:
    """Pairs of dtype and quantization that --dtype and --quantization allow, the first ones preferred; empty for any. The order of
    --quantization counts before that of --dtype.

    Raises:
        UserError: no machine was probed with one, or --quantization has to decide.
    """
    probed = dict.fromkeys((costs.dtype, costs.quantization) for machine in cluster.machines for costs in machine.costs)
    if model.quantization == ModelOptions.quantization:
        if len({rounding(quantization) for _, quantization in probed}) > 1:
            raise UserError(
                f"machines were probed in {_name_forms(probed)}, and fewer bits are not chosen unasked; choose with -q, such as "
                "-q none,int8 for int8 where it has to be"
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
            f"--dtype {join(model.dtype)} --quantization {join(model.quantization)}: machines were probed in {_name_forms(probed)} only; probe "
            "with these flags, too"
        )
    return tuple(dict.fromkeys(pairs))


def _is_asked_for(name: str, quantization: str, is_only: bool) -> bool:
    """Whether a value of --quantization stands for a name of ``HostCosts.quantization``: auto on its own for any, beside others for
    what is not rounded."""
    if quantization == "auto":
        return is_only or rounding(name) not in ROUNDINGS
    return rounding(name) == quantization


def _name_forms(forms: Iterable[tuple[str, str]]) -> str:
    return " and ".join(f"{dtype} ({quantization})" for dtype, quantization in forms)


def _usual_requests(length: int) -> Workload:
    """Requests of the default lengths, or of as much as a short context holds of them."""
    share = min(1.0, length / (DEFAULT_PROMPT + DEFAULT_OUTPUT))
    prompt = max(1, int(DEFAULT_PROMPT * share))
    return Workload((RequestLengths(prompt=prompt, output=max(1, min(DEFAULT_OUTPUT, length - prompt))),))
