"""Routes under /v1/cluster: ranks, statistics, traces and workload of a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec
from starlette.responses import Response

from labinfer.base.plugins import PLUGINS
from labinfer.observe.trace import trace_text
from labinfer.requests.openai import api_errors
from labinfer.server.gateway.cluster_answers import (
    ClusterInfo,
    ClusterRank,
    LayerExperts,
    RankExpertReads,
    StatsEvent,
    TraceEvent,
    TraceFile,
)
from labinfer.server.gateway.cluster_history import Watcher
from labinfer.server.gateway.endpoint import MODEL_ERRORS, NUMBER, STRING, endpoint
from labinfer.server.gateway.event_stream import EventStream
from labinfer.server.gateway.http_context import JSON, HttpContext
from labinfer.server.link.frames import ModelInfo, RankShardInfo
from labinfer.server.link.stats import RankStats

MAX_TRACE_SECONDS = 60.0
MAX_EVENTS_SECONDS = 86_400.0
LATE_SECONDS = 1.25
"""Maximum delay, in seconds, between a step and the arrival of its trace slices. Rank 0 sends the slices with the second stats
after the step, see ``Telemetry``."""
TRACE_NAME = "labinfer-trace.json"
JSONL = "application/jsonl"


@endpoint("GET", "/v1/cluster", logged=False, answer=ClusterInfo, query=(("model", STRING),), errors=MODEL_ERRORS)
async def show(context: HttpContext) -> Response:
    """The ranks of a model, and statistics of the model in the last hour."""
    info, history = context.service.loaded_model(context.query().get("model")).info, context.service.history
    stats = history.rank_stats(info.name)
    return context.json(
        ClusterInfo(
            time_us=round(context.service.wall_clock() * 1e6),
            model=info.name,
            num_layers=info.num_layers,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            num_window_blocks=info.num_window_blocks,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            stage_latency_seconds=info.stage_latency_seconds or None,
            pipeline_schedule=info.pipeline_schedule,
            plugins=PLUGINS.identities(),
            fingerprint=info.fingerprint,
            reproducible=info.reproducible,
            ranks=[_describe_rank(rank, stats.get(rank.rank)) for rank in info.ranks],
            experts=_describe_experts(stats.values()),
            expert_reads=_describe_reads(stats.values()),
            **history.present(info.name),
            machine_links=info.machine_links,
            plan=info.plan or None,
            history=history.points(info.name),
        )
    )


@endpoint(
    "GET",
    "/v1/cluster/events",
    logged=False,
    events=(StatsEvent, TraceEvent),
    query=(("model", STRING), ("seconds", NUMBER | {"minimum": 0, "maximum": MAX_EVENTS_SECONDS})),
    errors=MODEL_ERRORS,
)
async def events(context: HttpContext) -> EventStream:
    """Stream statistics and steps of a model, for ``seconds`` or until the client disconnects."""
    info, seconds = _read_query(context, MAX_EVENTS_SECONDS)
    watching = context.service.history.watching(info.name)
    watcher = watching.__enter__()  # not a ``with``, as the response ends after this function

    def end() -> None:
        watching.__exit__(None, None, None)
        context.end(200, log=False)

    return EventStream(
        _until(watcher, seconds, context.service.clock), context.headers, watcher.end, end, context.service.clock
    )


@endpoint(
    "GET",
    "/v1/cluster/trace",
    logged=False,
    answer=TraceFile,
    query=(("model", STRING), ("seconds", NUMBER | {"minimum": 0, "maximum": MAX_TRACE_SECONDS})),
    errors=MODEL_ERRORS,
)
async def trace(context: HttpContext) -> Response:
    """Trace of a model's steps, for the next ``seconds`` or as recorded while a client watched, for Perfetto."""
    info, seconds = _read_query(context, MAX_TRACE_SECONDS)
    history, span = context.service.history, {}
    if seconds:
        span = {"since": context.service.wall_clock(), "seconds": seconds}
        with history.watching(info.name) as watcher:
            await context.until_disconnect(
                _wait(_until(watcher, seconds + LATE_SECONDS, context.service.clock)), watcher.end
            )
    async with history.tracing:
        text = await asyncio.to_thread(lambda: "".join(trace_text(history.tracks(info.name, info.ranks, **span))))
    headers = context.headers | {"content-disposition": f'attachment; filename="{TRACE_NAME}"'}
    return Response(text, headers=headers, media_type=JSON)


@endpoint(
    "GET",
    "/v1/cluster/workload",
    logged=False,
    answer=str,
    content_type=JSONL,
    query=(("model", STRING),),
    errors=MODEL_ERRORS,
)
async def workload(context: HttpContext) -> Response:
    """Arrival times and lengths of the last 4096 complete requests of a model, as JSONL.

    For ``launch.py plan`` and ``simulate``.
    """
    name = context.service.loaded_model(context.query().get("model")).info.name
    return Response(context.service.recent_requests.lines(name), headers=context.headers, media_type=JSONL)


def _describe_rank(rank: RankShardInfo, stats: RankStats | None) -> ClusterRank:
    return ClusterRank(
        **msgspec.structs.asdict(rank),
        threads=stats.num_threads if stats else None,
        cpus=stats.cpus if stats else None,
    )


def _describe_experts(ranks: Iterable[RankStats]) -> list[LayerExperts]:
    loads = {layer: tokens for rank in ranks for layer, tokens in rank.expert_tokens.items()}
    return [LayerExperts(layer, tokens) for layer, tokens in sorted(loads.items())]


def _describe_reads(ranks: Iterable[RankStats]) -> list[RankExpertReads]:
    return [
        RankExpertReads(rank.rank, reads.hits, reads.misses, reads.bytes_read, reads.stall_time)
        for rank in ranks
        if (reads := rank.expert_reads) is not None
    ]


async def _until(watcher: Watcher, seconds: float | None, clock: Callable[[], float]) -> AsyncIterator[bytes]:
    """Yield the watcher's events until it ends or ``seconds`` have passed."""
    end = None if seconds is None else clock() + seconds
    while (data := await watcher.next(None if end is None else max(0.0, end - clock()))) is not None:
        yield data


async def _wait(events: AsyncIterator[bytes]) -> None:
    async for _ in events:
        pass


def _read_query(context: HttpContext, most: float) -> tuple[ModelInfo, float | None]:
    """Model and parameter ``seconds`` of the query (see ``_seconds``); 0 for a HEAD request."""
    query = context.query()
    info, seconds = context.service.loaded_model(query.get("model")).info, _seconds(query, most)
    return info, 0.0 if context.http.method == "HEAD" else seconds


def _seconds(query: dict[str, str], most: float) -> float | None:
    """Parse the query parameter ``seconds``, which is at most ``most``.

    Raises:
        ApiError: the parameter is not a number, or is out of bounds.
    """
    given = query.get("seconds")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= most:  # written so that NaN is refused, too
        raise api_errors.bad_request(f"seconds must be a number from 0 to {most:g}, not {given!r:.60}", "seconds")
    return seconds
