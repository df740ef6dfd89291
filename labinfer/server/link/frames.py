"""Frames exchanged by the gateway and the engine host; ``framing.py`` encodes them."""

from __future__ import annotations

import msgspec

from labinfer.base.heartbeat import Wait
from labinfer.base.pooling import PoolingConfig
from labinfer.base.rank_stats import Slices
from labinfer.comm.progress import Progress
from labinfer.engine.request import AnswerUpdate, Request
from labinfer.server.link.layout_change import LayoutChange
from labinfer.server.link.stats import EngineStats, TracedStep


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """A heartbeat of either side."""

    state: str = ""
    """Current step of the host's rank 0, and its wait for other ranks, as text."""
    wait: Wait | None = None
    """Wait of the host's rank 0 for other ranks, as a structure; None while it works."""


def host_heartbeat(progress: Progress) -> Heartbeat:
    """Heartbeat of the host, with step and wait of its rank 0."""
    waiting = progress.wait()
    if waiting is None:
        return Heartbeat(progress.describe())
    peers, seconds = waiting
    return Heartbeat(progress.describe(), Wait(rank=progress.rank, peers=peers, step=progress.step_id, seconds=seconds))


# From the gateway.


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Enqueue a request, whose key is its id; answered by ``Accepted`` or ``Refused``."""

    model: str
    request: Request
    admitted: bool = False
    """Whether an earlier host accepted the request: then a full queue does not refuse it."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Abort a request, or one of its answers, at once. Has no reply."""

    request_id: str
    index: int | None = None


class Watch(msgspec.Struct, frozen=True, array_like=True, tag="watch"):
    """Start or stop recording step traces of all models."""

    on: bool


class ChangeLayout(msgspec.Struct, frozen=True, array_like=True, tag="change_layout"):
    """Serve a model in another layout; answered by ``LayoutAnswer``."""

    change: LayoutChange


class Paused(msgspec.Struct, frozen=True, array_like=True, tag="paused"):
    """Reply to ``Rebuilding``: no more requests until the next ``Attach``."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The gateway accepts clients' requests: the tokenizers of the models in ``Attach`` are loaded."""


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The host is not accepted; the connection closes."""

    message: str


FromGateway = Heartbeat | Add | Abort | Watch | ChangeLayout | Paused | Ready | Rejected


# From the host.


class RegisterHost(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First frame of a host. The gateway accepts a host with its own version, token, models and plugins."""

    version: str
    token: str
    model_names: list[str]
    plugins: list[str] = []
    """Name and digest of each plugin."""


class RankShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Placement, device and shard of one rank of a model. Memory in bytes."""

    rank: int
    stage: int
    tp_rank: int
    host: str
    device: str
    first_layer: int
    num_layers: int
    dtype: str
    kv_dtype: str
    quantization: str
    weight_bytes: int
    kv_bytes: int


class MachineLinkInfo(msgspec.Struct, frozen=True):
    """A network link between two machines, measured at the start."""

    a: str
    b: str
    latency: float
    """Latency of a small message, in seconds."""
    bytes_per_second: float


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Model properties that the gateway needs."""

    name: str
    tokenizer: str
    """Path of the tokenizer."""
    tokenizer_digest: str = ""
    """``Tokenizer.digest`` on rank 0; empty without a tokenizer."""
    needs_tokenizer: bool
    """Whether the user named that path, so that it must contain a tokenizer."""
    response_template: str
    """Format of chat replies; see ``choose_format``."""
    chat_template: str
    """File of a chat template that replaces the checkpoint's; empty for none."""
    recommended: dict[str, int | float]
    """Sampling parameters recommended by the checkpoint."""
    vocab_size: int
    """Width of the logits."""
    hidden_size: int
    pooling: PoolingConfig = PoolingConfig()
    """Default pooling."""
    max_model_len: int
    context_shift: bool
    """Whether answers may exceed the context length."""
    num_layers: int
    num_parameters: int
    block_size: int
    """Tokens per KV block."""
    num_blocks: int
    """KV blocks per rank."""
    num_window_blocks: int = 0
    """KV blocks of sliding-window layers; 0 if all layers keep all tokens."""
    max_num_seqs: int
    """Maximum sequences per batch."""
    pipeline_schedule: str
    stage_latency_seconds: float = 0.0
    """Latency between two stages, measured at the start; 0 with one stage or without a measurement."""
    machine_links: list[MachineLinkInfo] = []
    """Links measured at the start."""
    plan: str = ""
    """Table of the planned layout and its alternatives; empty if the layout was not planned."""
    changed: str = ""
    """Model files that differ from those of the previous group of ranks, as text: its open requests cannot continue. Empty if none differ."""
    ranks: list[RankShardInfo]


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """All models are loaded; the gateway may send requests."""

    models: list[ModelInfo]


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The request is enqueued."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The host refuses a request, which cannot run."""

    request_id: str
    message: str
    queue_is_full: bool = False
    """Whether the request may succeed later."""
    is_too_long: bool = False
    """Whether the prompt exceeds the context length."""


class Updates(msgspec.Struct, frozen=True, array_like=True, tag="updates"):
    """New tokens and finish reasons of the requests in one step."""

    answers: list[tuple[str, AnswerUpdate]]
    """Updates of answers, as (request id, update) pairs."""


class StatsUpdate(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Counters of every engine."""

    engines: list[EngineStats]
    """Stats in the order of the models."""


class Trace(msgspec.Struct, frozen=True, array_like=True, tag="trace"):
    """Steps of a model and trace slices of its ranks, while a client watches."""

    model: str
    steps: list[TracedStep]
    """Steps completed since the last ``Trace``."""
    slices: list[tuple[int, Slices]]
    """Recorded time slices, as (rank, slices), of ranks that have sent some since then; slices may belong to other steps."""


class Rebuilding(msgspec.Struct, frozen=True, array_like=True, tag="rebuilding"):
    """The models are reloaded in another layout. All updates have been sent; the gateway resends open requests after the next
    ``Attach``."""


class LayoutAnswer(msgspec.Struct, frozen=True, array_like=True, tag="layout_answer"):
    """Outcome of a layout change, sent after the ``Attach`` of the layout that is served now."""

    problem: str = ""
    """Reason why the old layout is kept; empty if the layout has changed."""
    is_refused: bool = False
    """Whether the change was refused before anything was unloaded."""
    is_busy: bool = False
    """Whether the layout change was refused because another one is pending."""
    seconds: float = 0.0
    """Pause in seconds; 0 if nothing was unloaded."""


class Draining(msgspec.Struct, frozen=True, array_like=True, tag="draining"):
    """No more requests are accepted; running requests may finish within the drain timeout."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The host gives up all running requests and ends; the gateway must report this to its clients, and end."""


FromHost = (
    Heartbeat
    | RegisterHost
    | Attach
    | Accepted
    | Refused
    | Updates
    | StatsUpdate
    | Trace
    | Rebuilding
    | LayoutAnswer
    | Draining
    | Shutdown
)
