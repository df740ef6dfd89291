"""Hosting: loads the models of a server on all ranks, and reloads them in another layout while requests stay open."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from labinfer.api.llm import LLM, follow_all
from labinfer.base.config import EngineOptions
from labinfer.base.errors import CollectiveError, UserError
from labinfer.base.option_fields import join
from labinfer.base.other_engines import as_keywords
from labinfer.base.sampling_params import SamplingParams
from labinfer.cli.commands.changed_layout import changed_options, check_devices, kept_machines, layout_shape
from labinfer.cli.commands.loading import announce, load
from labinfer.cli.commands.session import Session
from labinfer.comm.spmd.machine import return_freed_memory
from labinfer.engine.request import Request
from labinfer.launch.layout.layout import make_layout
from labinfer.launch.measure.probe_layout import model_name
from labinfer.planner.cluster import MachinePairLink
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.host.engine_host import EngineHost, Layouts
from labinfer.server.host.followers import follow_host
from labinfer.server.host.gateway_connection import GatewayConnection
from labinfer.server.link.frames import LayoutAnswer, MachineLinkInfo
from labinfer.server.link.layout_change import LayoutChange
from labinfer.server.link.stats import Drift
from labinfer.weights.identity import Identity, compare

logger = logging.getLogger(__name__)

WORTH_SECONDS = 600.0
"""Seconds after a layout change within which the higher throughput must make up for the pause in which the layout changed."""
CHECK_PROMPT, CHECK_TOKENS = 4, 2
"""Numbers of tokens of prompt and answer in the self-check that follows a layout change."""


class Hosting:
    """Loads the models of a server, serves them, and reloads them in other layouts. Methods are collective over all ranks,
    including spare ones.

    Args:
        layouts: engine options of each model, by name.
        link: connection to the gateway; None on ranks other than 0.
        own: the server's options.
        on_ready: called once on rank 0, when the server accepts requests.
    """

    def __init__(
        self,
        session: Session,
        layouts: Layouts,
        link: GatewayConnection | None,
        own: ServerOptions,
        on_ready: Callable[[], None],
    ):
        self._session, self._group, self._link = session, session.group, link
        self._plan_text = session.plan_text
        self._layouts, self._own, self._on_ready = layouts, own, on_ready
        self._failed: list[Layouts] = []
        self._load_seconds = 0.0
        self._identities: dict[str, Identity] = {}
        """By model name, identity of the model's files when the gateway's open requests began; on rank 0 only."""
        self.llms: dict[str, LLM] = {}
        self._host: EngineHost | None = None

    def load(self) -> None:
        """Load the models, and print a table of the ranks.

        Raises:
            CollectiveError: a model cannot be loaded.
        """
        supervisor = self._session.environment.supervisor
        if self._group.rank == 0 and supervisor is not None and (data := supervisor.read_identity()):
            self._identities = msgspec.msgpack.decode(data, type=dict[str, Identity])
        self._load(self._layouts)
        self._prepare(None)

    def run(self) -> None:
        """Serve the models until a signal arrives. Layouts change on request.

        Raises:
            BrokenConnection: the gateway is gone; raised on rank 0.
            RuntimeError: neither a new layout nor the previous one can be loaded.
        """
        while (layouts := self._run_host()) is not None:
            begin = time.monotonic()
            problem = self._change(layouts)
            seconds = time.monotonic() - begin
            if self._group.rank == 0:
                now = (
                    f"the layout change failed, serving with the previous layout: {problem}"
                    if problem
                    else "layout changed"
                )
                logger.info("%s (paused for %.1f s)", now, seconds)
            self._prepare(LayoutAnswer(problem, seconds=seconds))

    def _prepare(self, outcome: LayoutAnswer | None) -> None:
        with self._group.raise_on_all_ranks():
            if self._group.rank == 0:
                self._host = EngineHost(
                    self.llms,
                    self._link,
                    self._session.signals.check,
                    self._own.drain_timeout,
                    is_last=self._session.environment.supervisor is None,
                    plan_change=self._plan,
                    plan_split=self._plan_split if self._own.replan == "auto" else lambda model, drift: None,
                    outcome=outcome,
                    on_ready=self._tell_ready,
                    plan=self._plan_text,
                    machine_links=_machine_links(self._session.links),
                    changed=self._changes(),
                )
                announce(self.llms)
                if missing := next(iter(self.llms.values())).stats.energy_missing:
                    logger.info("energy of rank 0 is not measured: %s", "; ".join(missing))

    def _changes(self) -> dict[str, str]:
        """By model name, text about changes of the model's files since the gateway's open requests began."""
        changes = {
            name: compare(self._identities[name], llm.files.identity)
            for name, llm in self.llms.items()
            if name in self._identities
        }
        for path in (path for change in changes.values() for path in change.rewritten):
            logger.warning(
                "warning: %s was modified, but its header and samples of all its tensors are unchanged; treating it as the same file",
                path,
            )
        return {name: change.describe() for name, change in changes.items()}

    def _tell_ready(self) -> None:
        self._identities = {name: llm.files.identity for name, llm in self.llms.items()}
        if (supervisor := self._session.environment.supervisor) is not None:
            supervisor.write_identity(msgspec.msgpack.encode(self._identities))
        on_ready, self._on_ready = self._on_ready, lambda: None
        on_ready()

    def _run_host(self) -> Layouts | None:
        """Serve until a signal arrives (returns None), or until a layout change is due (returns the new engine options of each
        model)."""
        layouts = None
        with self._group.raise_on_all_ranks():  # spare ranks wait here until serving ends
            if self._group.rank == 0:
                layouts = self._host.run()
                for llm in self.llms.values():
                    llm.end_run()
            else:
                follow_host(list(self.llms.values()))
        self._host = None
        data = self._group.comm.all_gather_bytes(msgspec.msgpack.encode(layouts) if self._group.rank == 0 else b"")
        return msgspec.msgpack.decode(data[0], type=Layouts | None)

    def _plan(self, change: LayoutChange) -> Layouts | None:
        """Engine options by model after ``change``; None if nothing changes. Called on rank 0 only.

        Raises:
            UserError: the change is not possible.
        """
        llm = self.llms[change.model]
        try:
            if change.plan is not None and change.plan.model != (own := model_name(llm.layout.config)):
                raise UserError(
                    f"plan is for another model ({change.plan.model}) than {change.model} ({own}); make a new plan"
                )
            options = self._changed_options(change)
            layout = make_layout(options, llm.layout.config, self._group.everyone)
            if change.plan is not None:
                check_devices(llm.layout, layout)
        except UserError as error:
            raise UserError(as_keywords(str(error))) from None
        if len(self.llms) > 1 and layout.topology.placed_ranks != llm.layout.topology.placed_ranks:
            raise UserError("ranks: with several models, all must keep the ranks that they have; give the same ranks")
        return None if layout_shape(layout) == layout_shape(llm.layout) else self._layouts | {change.model: options}

    def _plan_split(self, name: str, drift: Drift) -> Layouts | None:
        """Engine options of each model after a better layer split of model ``name``, on rank 0; None if loading that split has
        failed before, or if it gains too little."""
        change = LayoutChange(
            model=name,
            tensor_parallel_size=list(self.llms[name].layout.topology.tp_sizes),
            layers=drift.layers,
            ranks=list(self._layouts[name].parallel.ranks) or None,
        )
        layouts = self._layouts | {name: self._changed_options(change)}
        if layouts in self._failed or drift.gain * WORTH_SECONDS <= self._load_seconds:
            return None
        logger.info("--replan auto: changing the layers per stage of %s to %s", name, join(drift.layers))
        return layouts

    def _changed_options(self, change: LayoutChange) -> EngineOptions:
        """Engine options of a model after ``change``. The context length is kept even if a longer one would fit,
        because a later change could not reduce it again.

        Raises:
            UserError: see ``changed_options``.
        """
        options, llm, everyone = self._layouts[change.model], self.llms[change.model], self._group.everyone
        machines, devices = [info.node for info in everyone], []
        if change.plan is not None:
            machines, devices = kept_machines(change.plan, options, llm.layout.all_devices, everyone)
        options = changed_options(options, change, machines, devices)
        length = llm.spec.max_model_len
        return replace(options, model=replace(options.model, max_model_len=length))

    def _change(self, layouts: Layouts) -> str:
        """Reload the models in other layouts. If that fails, reload them in the previous layouts. Returns the error; empty if the
        change succeeded."""
        lengths = [llm.spec.max_model_len for llm in self.llms.values() if not llm.is_spare]
        try:
            with self._group.raise_on_all_ranks():  # with other files, open answers would continue with another model
                for llm in self.llms.values():
                    llm.files.check_unchanged()
        except CollectiveError as error:
            return str(error)
        try:
            self._reload(layouts)
            self._check(lengths)
            self._layouts = layouts
            self._plan_text = ""  # planned for the layouts before the change
            return ""
        except CollectiveError as error:
            problem = str(error)
        self._failed.append(layouts)
        try:
            self._reload(self._layouts)
        except CollectiveError as error:
            raise RuntimeError(f"{problem}; the previous layout cannot be loaded either: {error}") from None
        return problem

    def _reload(self, layouts: Layouts) -> None:
        while self.llms:
            self.llms.popitem()[1].unload()
        self._group.end_splits()
        return_freed_memory()
        ranks = [options.working_ranks for options in layouts.values()]
        self._group.take_cores(sum(ranks, ()) if all(ranks) else (), self._session.options.runtime.threads)
        self._load(layouts)

    def _load(self, layouts: Layouts) -> None:
        begin = time.monotonic()
        for name, options in layouts.items():
            self.llms[name] = load(self._session, options, tuple(self.llms.values()))
        self._load_seconds = time.monotonic() - begin

    def _check(self, lengths: list[int]) -> None:
        """Check, after a layout change, that the models compute finite numbers, and that no context length has become
        shorter.

        Args:
            lengths: context length of each model before the change.

        Raises:
            CollectiveError: log-probabilities are not finite, or a context is shorter than before.
        """
        llms = list(self.llms.values())
        with self._group.raise_on_all_ranks():
            problem: UserError | None = None
            if self._group.rank == 0:
                try:
                    for llm, length in zip(llms, lengths, strict=True):
                        _check_length(llm, length)
                        check_numbers(llm)
                except UserError as error:
                    problem = error
                for llm in llms:
                    llm.driver.drain()
                    llm.engine.end_run()
            else:
                follow_all(llms)
            if problem is not None:
                raise problem


def check_numbers(llm: LLM) -> None:
    """Check that a model computes finite numbers, by a short prompt on rank 0; the other ranks take part.

    Raises:
        UserError: log-probabilities of the prompt are not finite.
    """
    vocab_size, length = llm.spec.vocab_size, llm.spec.max_model_len
    prompt = [number % vocab_size for number in range(1, 1 + min(CHECK_PROMPT, length - 1))]
    sampling = SamplingParams(
        max_tokens=min(CHECK_TOKENS, length - len(prompt)),
        temperature=0.0,
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=1,
    )
    request = Request(key="self-check", prompt_token_ids=prompt, sampling=sampling, cache_salt="self-check")
    llm.driver.add(request.key, request)
    while llm.driver.has_work:
        for _, update in llm.driver.step():
            measured = [*update.logprobs, *(update.prompt_logprobs or ())]
            if not all(math.isfinite(item.logprob) for item in measured):
                raise UserError("its self-check gives log-probabilities that are not finite")


def _check_length(llm: LLM, length: int) -> None:
    if llm.spec.max_model_len < length:
        raise UserError(
            f"its memory allows a context length of only {llm.spec.max_model_len} tokens, and {length} are served; use more ranks or a smaller quantization"
        )


def _machine_links(links: Sequence[MachinePairLink]) -> list[MachineLinkInfo]:
    """Convert measured links between machines to the structs that frames to the gateway contain."""
    return [
        MachineLinkInfo(pair.a, pair.b, pair.link.latency, pair.link.bytes_per_second)
        for pair in links
        if pair.a != pair.b
    ]
