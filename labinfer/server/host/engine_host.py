"""EngineHost: runs the gateway's requests on the engines of one or more models, on rank 0."""

from __future__ import annotations

import logging
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.base.errors import BrokenConnection, Interrupted, PromptTooLong, UserError, is_failure
from labinfer.engine.llm_engine import QueueFull
from labinfer.requests.recommended_sampling import recommended_sampling
from labinfer.server.host.gateway_connection import GatewayConnection
from labinfer.server.host.hosted_model import HostedModel
from labinfer.server.host.in_process_connection import InProcessConnection
from labinfer.server.host.stage_slowdown import StageSlowdownDetector
from labinfer.server.host.telemetry import Telemetry
from labinfer.server.link.frames import (
    Abort,
    Accepted,
    Add,
    Attach,
    ChangeLayout,
    Draining,
    FromGateway,
    LayoutAnswer,
    MachineLinkInfo,
    Paused,
    Ready,
    Rebuilding,
    Refused,
    Rejected,
    Shutdown,
    Updates,
    Watch,
)
from labinfer.server.link.layout_change import LayoutChange
from labinfer.server.link.stats import Drift

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.25
"""Seconds that an idle rank 0 sleeps at a time. A frame wakes rank 0 at once; a signal is noticed after the sleep at the latest."""
SOON_SECONDS = 0.01
"""Seconds that an otherwise idle rank 0 sleeps at a time while a request with structured output waits until grammars can be
compiled. (A thread is reading the tokenizer for grammars.)"""
STABLE_SECONDS = 30.0
"""Seconds for which a better split of the layers must continuously exist before the layout changes."""

Layouts = dict[str, EngineOptions]
"""Maps each model name to the model's engine options."""


def refuse_changes(change: LayoutChange) -> None:
    """Refuse a layout change, for servers that cannot reload their models.

    Raises:
        UserError: always.
    """
    raise UserError("the layout cannot be changed on this server")


class EngineHost:
    """Steps the engines of all models on rank 0 while there is work, and sleeps otherwise.

    Args:
        models: models of the group of ranks, by served name.
        link: connection to the gateway that has accepted this engine host, or to callers in this process.
        check: raises ``Interrupted`` when a signal has requested the end.
        drain_seconds: timeout for open requests after a signal.
        is_last: whether the gateway ends with this engine host. False under a supervisor, which ends the gateway
            itself: launchers also send SIGTERM to the remaining ranks when one has died.
        plan_change: returns the layouts of all models after a change, or None if nothing changes. It raises a ``UserError`` if the
            change is impossible.
        plan_split: returns the layouts of all models after a better split of one model's layers, or None if the gain does not
            justify the pause.
        outcome: outcome of the layout change before this engine host started, which is sent to the gateway.
        on_ready: called when the gateway accepts requests.
        plan: table of the layout and its alternatives; empty if the layout was not planned.
        machine_links: links between machines that were measured for the plan.
        changed: text about changed files, by model name; see ``ModelInfo``.
        clock: monotonic time in seconds.

    Raises:
        UserError: the recommended sampling of a checkpoint cannot be read.
    """

    def __init__(
        self,
        models: dict[str, LLM],
        link: GatewayConnection | InProcessConnection,
        check: Callable[[], None],
        drain_seconds: float,
        *,
        is_last: bool = True,
        plan_change: Callable[[LayoutChange], Layouts | None] = refuse_changes,
        plan_split: Callable[[str, Drift], Layouts | None] = lambda model, drift: None,
        outcome: LayoutAnswer | None = None,
        on_ready: Callable[[], None] = lambda: None,
        plan: str = "",
        machine_links: Sequence[MachineLinkInfo] = (),
        changed: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._models = {
            name: HostedModel(
                name=name,
                llm=llm,
                recommended=recommended_sampling(llm.directory) or {},
                clock=clock,
                slowdown_detector=_slowdown_detector(llm),
                plan=plan,
                machine_links=machine_links,
                changed=(changed or {}).get(name, ""),
            )
            for name, llm in models.items()
        }
        self._link = link
        self._check, self._drain_seconds, self._is_last, self._clock = check, drain_seconds, is_last, clock
        self._open: dict[str, HostedModel] = {}  # model of each open request, by request id
        self._early: dict[str, Add] = {}  # requests, by id, that wait until grammars can be compiled
        health_channel = next(iter(models.values())).group.health_channel
        self._telemetry = Telemetry(list(self._models.values()), self._link.send, health_channel, clock)
        self._drain_until: float | None = None
        self._plan_change, self._plan_split, self._outcome = plan_change, plan_split, outcome
        self._on_ready = on_ready
        self._change: Layouts | None = None

    def run(self) -> Layouts | None:
        """Serve until a signal arrives (and the open requests have finished or timed out), or until the layout changes.

        Returns:
            The layouts of the next engine host, which resumes the open requests; None after a signal.

        Raises:
            BrokenConnection: the gateway is gone.
        """
        for frame in self._link.receive(0.0):  # the gateway may have rejected this host while models were loading
            self._handle(frame)
        self._link.send(Attach([model.describe() for model in self._models.values()]))
        if self._outcome is not None:
            self._link.send(self._outcome)
        while self._change is None and not self._is_over():
            working = [model for model in self._models.values() if model.llm.engine.has_work]
            for frame in self._link.receive(0.0 if working else SOON_SECONDS if self._early else IDLE_SECONDS):
                self._handle(frame)
            for frame in list(self._early.values()):
                self._add(frame)
            for model in working:
                self._step(model)
            self._telemetry.send_if_due(bool(working))
            self._watch_drift()
        if self._change is not None:
            self._hand_back()
        for model in self._models.values():
            model.llm.driver.drain()
        if self._change is None and self._is_last:
            self._link.send(Shutdown())
        return self._change

    def _hand_back(self) -> None:
        """Complete the steps in flight, and make the gateway keep the open requests for the next engine host."""
        for model in self._models.values():
            while model.llm.engine.scheduler.in_flight:
                self._step(model, launches=False)
        self._link.send(Rebuilding())
        has_paused = False
        while not has_paused:
            for frame in self._link.receive(IDLE_SECONDS):  # requests are dropped: the gateway resends them
                has_paused |= isinstance(frame, Paused)
                if isinstance(frame, ChangeLayout):
                    self._link.send(LayoutAnswer(is_refused=True, is_busy=True))

    def _is_over(self) -> bool:
        if self._drain_until is None:
            try:
                self._check()
            except Interrupted as error:
                self._drain_until = self._clock() + self._drain_seconds
                self._link.send(Draining())
                if error.signum:  # 0 if a program, and no signal, has closed the server
                    open_requests = _describe_open(len(self._open) + len(self._early), self._drain_seconds)
                    logger.info("stopping at %s: %s", signal.Signals(error.signum).name, open_requests)
            return False
        return not (self._open or self._early) or self._clock() > self._drain_until

    def _watch_drift(self) -> None:
        """Log stages that have slowed down. If a better split of the layers persists, and ``plan_split`` returns layouts for it,
        change the layout."""
        for model in self._models.values():
            watch = model.slowdown_detector
            if watch is None or watch.drift is None or watch.drift is model.handled_drift:
                continue
            before, drift = model.handled_drift, watch.drift
            model.handled_drift = drift
            if drift.slow is not None and (before is None or before.slow != drift.slow):
                logger.warning("%s", _describe_drift(model.llm, drift))
            elif drift.slow is None and before is not None and before.slow is not None:
                logger.info("stage %d is back to its speed at startup", before.slow)
            is_lasting = self._clock() - watch.better_since >= STABLE_SECONDS
            if drift.layers and is_lasting and self._change is None and self._drain_until is None:
                self._change = self._plan_split(model.name, drift)

    def _handle(self, frame: FromGateway) -> None:
        if isinstance(frame, Add):
            self._add(frame)
        elif isinstance(frame, Abort):
            self._abort(frame)
        elif isinstance(frame, ChangeLayout):
            self._change_layout(frame)
        elif isinstance(frame, Watch):
            self._telemetry.watch(frame.on)
        elif isinstance(frame, Ready):
            if self._drain_until is None:
                self._on_ready()
        elif isinstance(frame, Rejected):
            raise BrokenConnection(f"the gateway rejects this engine: {frame.message}")

    def _change_layout(self, frame: ChangeLayout) -> None:
        if self._change is not None:
            self._link.send(LayoutAnswer(is_refused=True, is_busy=True))
            return
        try:
            if self._drain_until is not None:
                raise UserError("the server is shutting down")
            self._change = self._plan_change(frame.change)
        except UserError as error:
            self._link.send(LayoutAnswer(str(error), is_refused=True))
            return
        if self._change is None:  # the layout is already in use
            self._link.send(LayoutAnswer())

    def _add(self, frame: Add) -> None:
        model, request_id = self._models[frame.model], frame.request.key
        self._early.pop(request_id, None)
        if frame.request.sampling.structured_outputs is not None and not model.llm.guides.get_ready():
            self._early[request_id] = frame  # added later, so that it does not delay steps of other requests
            return
        if not model.llm.engine.has_work:
            model.last_step = self._clock()
        try:
            model.llm.check_processors(frame.request)  # ``add`` checks everything else
            model.llm.driver.add(request_id, frame.request, frame.admitted)
            model.unread_prompts[request_id] = len(frame.request.prompt_token_ids)
        except QueueFull as error:
            self._link.send(Refused(request_id, str(error), queue_is_full=True))
            return
        except UserError as error:
            self._link.send(Refused(request_id, str(error), is_too_long=isinstance(error, PromptTooLong)))
            return
        except BaseException as error:  # an error of a library or plugin: other requests continue
            if not is_failure(error):
                raise
            logger.error("a request fails\n%s", traceback.format_exc().rstrip())
            self._link.send(Refused(request_id, f"the request fails with {type(error).__name__}"))
            return
        self._open[request_id] = model
        self._link.send(Accepted(request_id))

    def _abort(self, frame: Abort) -> None:
        self._early.pop(frame.request_id, None)
        model = self._open.get(frame.request_id)
        if model is None:  # the request has ended meanwhile
            return
        model.llm.driver.abort(frame.request_id, frame.index)
        self._forget_if_done(model, frame.request_id)

    def _step(self, model: HostedModel, launches: bool = True) -> None:
        engine = model.llm.engine
        if not engine.has_work:  # the frame has aborted the last request
            return
        outputs = model.step(launches)
        if outputs:
            self._link.send(Updates(outputs))
        for request_id, _ in outputs:
            self._forget_if_done(model, request_id)
        if not engine.has_work:
            assert engine.blocks.num_free == engine.blocks.num_blocks, "an idle engine holds KV blocks"

    def _forget_if_done(self, model: HostedModel, request_id: str) -> None:
        if not model.llm.driver.is_open(request_id):
            self._open.pop(request_id, None)
            model.unread_prompts.pop(request_id, None)


def _describe_open(count: int, seconds: float) -> str:
    if not count:
        return "no open requests"
    what = "1 open request has" if count == 1 else f"{count} open requests have"
    return f"{what} {seconds:g} seconds to finish. A second signal stops immediately"


def _slowdown_detector(llm: LLM) -> StageSlowdownDetector | None:
    topology = llm.layout.topology
    if topology.num_stages == 1:
        return None
    return StageSlowdownDetector([end - begin for begin, end in topology.layers], topology.num_places)


def _describe_drift(llm: LLM, drift: Drift) -> str:
    ranks = llm.layout.topology.stage_ranks(drift.slow)
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {llm.group.everyone[drift.rank].node}"
    text = f"stage {drift.slow} ({who}) takes {drift.factors[drift.slow]:.1f} times as long as at startup"
    if drift.layers:
        text += f"; --layers {','.join(map(str, drift.layers))} would give {1 + drift.gain:.2f} times the throughput"
    return text
