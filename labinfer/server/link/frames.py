"""The frames that the gateway and the engine host exchange; ``framing.py`` is how they go over the socket."""

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
    """A sign of life, from either side."""

    state: str = ""
    """The host's step, and what it waits for, in words."""
    wait: Wait | None = None
    """The same in numbers; None while the host works."""


def host_heartbeat(progress: Progress) -> Heartbeat:
    """Sign of life of the host, with step and wait of its rank 0."""
    waiting = progress.wait()
    if waiting is None:
        return Heartbeat(progress.describe())
    peers, seconds = waiting
    return Heartbeat(progress.describe(), Wait(rank=progress.rank, peers=peers, step=progress.step_id, seconds=seconds))


# From the gateway.


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Queue a request, whose key is its id; answered by ``Accepted`` or ``Refused``."""

    model: str
    request: Request
    admitted: bool = False
    """Whether an earlier host has taken it: then the queue cannot be too full for it."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End a request, or one of its answers, at once. No word comes back."""

    request_id: str
    index: int | None = None


class Watch(msgspec.Struct, frozen=True, array_like=True, tag="watch"):
    """Record the steps of all models from now on, or no longer."""

    on: bool


class ChangeLayout(msgspec.Struct, frozen=True, array_like=True, tag="change_layout"):
    """Serve a model in another layout from now on; answered by ``LayoutAnswer``."""

    change: LayoutChange


class Paused(msgspec.Struct, frozen=True, array_like=True, tag="paused"):
    """The answer to ``Rebuilding``: no request comes from now on until the next ``Attach``."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Clients' requests are taken from now on: the tokenizers of what ``Attach`` named are loaded, too."""


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The host is not taken in; the connection closes."""

    message: str


FromGateway = Heartbeat | Add | Abort | Watch | ChangeLayout | Paused | Ready | Rejected


# From the host.


class RegisterHost(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first frame of a host. The gateway takes one of its own version, with its token, for its models, and with its plugins."""

    version: str
    token: str
    model_names: list[str]
    plugins: list[str] = []
    """Name and digest of each plugin."""


class RankShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Place, device and share of one rank in a model. Memory in bytes."""

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
    """The way from one machine to another, as it was measured at the start."""

    a: str
    b: str
    latency: float
    """Seconds of a small message."""
    bytes_per_second: float


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the gateway needs to know it."""

    name: str
    tokenizer: str
    """Directory."""
    tokenizer_digest: str = ""
    """``Tokenizer.digest`` on rank 0; empty where there is none."""
    needs_tokenizer: bool
    """Whether that directory was asked for by the user, and must have one."""
    response_template: str
    """Format of chat replies; see ``choose_format``."""
    chat_template: str
    """File with another chat template than the checkpoint's; empty for none."""
    recommended: dict[str, int | float]
    """Sampling that the checkpoint recommends."""
    vocab_size: int
    """Width of the logits."""
    hidden_size: int
    pooling: PoolingConfig = PoolingConfig()
    """Pooling of requests that do not name one."""
    max_model_len: int
    context_shift: bool
    """Whether answers may be longer than the context."""
    num_layers: int
    block_size: int
    """Tokens of a KV block."""
    num_blocks: int
    """KV blocks, as many on every rank."""
    num_window_blocks: int = 0
    """KV blocks of layers with a window; 0 where all layers hold the same tokens."""
    max_num_seqs: int
    """Sequences that run at once."""
    pipeline_schedule: str
    hop_seconds: float = 0.0
    """Time between two stages, measured at the start; 0 where there is one stage, or nothing was measured."""
    machine_links: list[MachineLinkInfo] = []
    """Links that were measured at the start."""
    plan: str = ""
    """The layout and its alternatives, as a table; empty where the start was not planned."""
    changed: str = ""
    """The files that differ from those of the group of ranks before, in words: no answer of that group can go on. Empty where all are
    the same."""
    ranks: list[RankShardInfo]


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """All models are loaded: requests may come."""

    models: list[ModelInfo]


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The request is queued."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The request cannot run."""

    request_id: str
    message: str
    queue_is_full: bool = False
    """Whether it could run later."""
    is_too_long: bool = False
    """Whether its prompt does not fit in the context."""


class Updates(msgspec.Struct, frozen=True, array_like=True, tag="updates"):
    """New tokens of the requests of one step, and their ends."""

    answers: list[tuple[str, AnswerUpdate]]
    """Each with the id of its request."""


class StatsUpdate(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Counters of every engine."""

    engines: list[EngineStats]
    """In the order of the models."""


class Trace(msgspec.Struct, frozen=True, array_like=True, tag="trace"):
    """Steps of a model and slices of its ranks, while somebody watches."""

    model: str
    steps: list[TracedStep]
    """Steps that came back since the frame before."""
    slices: list[tuple[int, Slices]]
    """By rank, of those that sent some since then; they may be of other steps as well."""


class Rebuilding(msgspec.Struct, frozen=True, array_like=True, tag="rebuilding"):
    """The models are loaded again in another layout. The news of all steps has been told: what is open goes on after the next
    ``Attach``, for which it is to be handed over once more."""


class LayoutAnswer(msgspec.Struct, frozen=True, array_like=True, tag="layout_answer"):
    """The end of a change of the layout, behind the ``Attach`` of the layout that is served now."""

    problem: str = ""
    """The reason why the layout is what it was before; empty where it has changed."""
    is_refused: bool = False
    """Whether that was found before anything was taken down."""
    is_busy: bool = False
    """Whether another change was under way, so that this one was not looked at."""
    seconds: float = 0.0
    """Time in which nothing ran; 0 where nothing was taken down."""


class Draining(msgspec.Struct, frozen=True, array_like=True, tag="draining"):
    """No request is taken any more; those that run come to their ends, or their time does."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """Whatever still runs is given up; the gateway is to say so to its clients and end."""


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
