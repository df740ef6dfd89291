"""Frames exchanged by the gateway and the engine host; ``framing.py`` encodes them."""

from __future__ import annotations

import msgspec

from labinfer.base.heartbeat import Wait
from labinfer.base.pooling import PoolingConfig
from labinfer.base.rank_stats import Slices
from labinfer.base.score_head import ScoreHead
from labinfer.comm.progress import Progress
from labinfer.engine.request import AnswerUpdate, Request
from labinfer.server.link.layout_change import LayoutChange
from labinfer.server.link.stats import EngineStats, TracedStep


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Heartbeat of the gateway or of the engine host."""

    state: str = ""
    """Current step of rank 0, and its wait for other ranks, as text; empty in heartbeats of the gateway."""
    wait: Wait | None = None
    """Wait of rank 0 for other ranks; None while rank 0 works."""


def host_heartbeat(progress: Progress) -> Heartbeat:
    """Make the engine host's heartbeat from rank 0's ``progress``: its current step, and the ranks that it waits for, if any."""
    waiting = progress.wait()
    if waiting is None:
        return Heartbeat(progress.describe())
    peers, seconds = waiting
    return Heartbeat(progress.describe(), Wait(rank=progress.rank, peers=peers, step=progress.step_id, seconds=seconds))


# Frames that the gateway sends.


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Enqueue a request. Its key is its id. The reply is ``Accepted`` or ``Refused``."""

    model: str
    request: Request
    admitted: bool = False
    """Whether an earlier engine host has accepted the request. If so, the next host accepts it even if its queue is full."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Abort a request, or one of its answers (``index``), at once. There is no reply."""

    request_id: str
    index: int | None = None


class Watch(msgspec.Struct, frozen=True, array_like=True, tag="watch"):
    """Make all ranks start (``on``) or stop recording step traces of all models."""

    on: bool


class ChangeLayout(msgspec.Struct, frozen=True, array_like=True, tag="change_layout"):
    """Request to serve a model in another layout. The reply is ``LayoutAnswer``."""

    change: LayoutChange


class Paused(msgspec.Struct, frozen=True, array_like=True, tag="paused"):
    """Reply to ``Rebuilding``: the gateway sends no more requests until the next ``Attach``."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The gateway accepts requests of clients: it has loaded the tokenizers of the models in ``Attach``."""


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The gateway rejects the engine host, and closes the connection."""

    message: str


FromGateway = Heartbeat | Add | Abort | Watch | ChangeLayout | Paused | Ready | Rejected


# Frames that the engine host sends.


class RegisterHost(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First frame of an engine host. The gateway accepts a host only if its version, token, models and plugins equal those of the
    gateway."""

    version: str
    token: str
    model_names: list[str]
    plugins: list[str] = []
    """Name and digest of each plugin."""


class RankShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Placement, device and shard of one rank of a model. Memory is in bytes."""

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
    """A network link between two machines, measured at startup."""

    a: str
    b: str
    latency: float
    """Latency of a small message over the link, in seconds."""
    bytes_per_second: float


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a model, for the gateway."""

    name: str
    tokenizer: str
    """Path of the model's tokenizer."""
    tokenizer_digest: str = ""
    """``Tokenizer.digest`` on rank 0; empty without a tokenizer."""
    needs_tokenizer: bool
    """Whether the user has given the path of the tokenizer, so that a missing tokenizer is an error."""
    response_template: str
    """Format of chat replies, by name or file; see ``choose_format``."""
    chat_template: str
    """Path of a chat template that replaces the checkpoint's; empty for none."""
    recommended: dict[str, int | float]
    """Sampling parameters recommended by the checkpoint."""
    vocab_size: int
    """Length of a row of logits; at least the number of token ids of the tokenizer."""
    hidden_size: int
    pooling: PoolingConfig = PoolingConfig()
    """Pooling of embedding requests that do not set it."""
    score_head: ScoreHead | None = None
    """Head of a classifier or reranker; None for other models."""
    max_model_len: int
    context_shift: bool
    """Whether answers may exceed the context length (``--context-shift``)."""
    num_layers: int
    num_parameters: int
    block_size: int
    """Tokens per KV block."""
    num_blocks: int
    """KV blocks per rank."""
    num_window_blocks: int = 0
    """Number of window blocks per rank, which only sliding-window layers use; 0 if these layers use ordinary KV blocks."""
    max_num_seqs: int
    """Maximum sequences per batch."""
    pipeline_schedule: str
    stage_latency_seconds: float = 0.0
    """Latency in seconds of a message between two stages, measured at startup; 0 with a single stage or if it was not measured."""
    machine_links: list[MachineLinkInfo] = []
    """Links between machines, measured at startup."""
    plan: str = ""
    """Table of the planned layout and its alternatives; empty if the layout was not planned."""
    changed: str = ""
    """Text about model files that have changed since the previous group of ranks loaded them; open requests of the previous group
    cannot be continued. Empty if no file has changed."""
    fingerprint: str = ""
    """Digest of all that answers depend on: ``Fingerprint.digest``."""
    reproducible: bool = False
    """Whether models with equal fingerprints give bit-identical answers (``--reproducible``)."""
    ranks: list[RankShardInfo]


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """All models are loaded, so the gateway may send requests."""

    models: list[ModelInfo]


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The engine host has enqueued a request."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The engine host refuses a request that cannot run."""

    request_id: str
    message: str
    queue_is_full: bool = False
    """Whether the queue was full, so that the request may succeed later."""
    is_too_long: bool = False
    """Whether the prompt exceeds the context length."""


class Updates(msgspec.Struct, frozen=True, array_like=True, tag="updates"):
    """New tokens and finish reasons of the requests in a step."""

    answers: list[tuple[str, AnswerUpdate]]
    """Updates of answers, as (request id, update) pairs."""


class StatsUpdate(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Current statistics of all engines of the engine host."""

    engines: list[EngineStats]
    """Stats of each engine, in the order of the models in ``Attach``."""


class Trace(msgspec.Struct, frozen=True, array_like=True, tag="trace"):
    """Steps of a model, and trace slices of its ranks, while a client watches."""

    model: str
    steps: list[TracedStep]
    """Steps that were completed since the last ``Trace``."""
    slices: list[tuple[int, Slices]]
    """Trace slices, as (rank, slices), of ranks that have sent slices since the last ``Trace``. They may belong to steps that are
    not in ``steps``."""


class Rebuilding(msgspec.Struct, frozen=True, array_like=True, tag="rebuilding"):
    """The models are being reloaded in another layout. All updates have been sent. The gateway submits open requests
    again after the next ``Attach``."""


class LayoutAnswer(msgspec.Struct, frozen=True, array_like=True, tag="layout_answer"):
    """Outcome of a layout change. It follows the ``Attach`` of the layout that is now served."""

    problem: str = ""
    """Reason why the previous layout is kept; empty if the layout has changed."""
    is_refused: bool = False
    """Whether the change was refused before any model was unloaded."""
    is_busy: bool = False
    """Whether the change was refused because another change is in progress."""
    seconds: float = 0.0
    """Seconds in which no request ran; 0 if nothing was unloaded."""


class Draining(msgspec.Struct, frozen=True, array_like=True, tag="draining"):
    """The engine host accepts no more requests; running ones may finish within the drain timeout."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The engine host aborts all running requests and ends. The gateway must report this to its clients, and end, too."""


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
