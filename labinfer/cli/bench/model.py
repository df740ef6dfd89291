"""BenchModel: the part of ``LLM``'s interface that benchmarks use. The simulator implements this part, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from labinfer.base.clock import Clock
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.llm_engine import LLMEngine
from labinfer.engine.request import Request
from labinfer.engine.spec import EngineSpec
from labinfer.observe.report import RunReport
from labinfer.requests.outputs import Delta, RequestOutput
from labinfer.requests.prompts import PromptLike


class BenchModel(Protocol):
    """A model (or a simulated one) as benchmarks use it on rank 0. Members have the meanings that they have in ``LLM``."""

    clock: Clock
    spec: EngineSpec
    engine: LLMEngine

    @property
    def report(self) -> RunReport: ...

    def make_request(self, key: Any, prompt: PromptLike, sampling: SamplingParams) -> Request: ...

    def run(
        self,
        requests: Iterable[Request | None],
        check: Callable[[], None],
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Iterator[RequestOutput]: ...
