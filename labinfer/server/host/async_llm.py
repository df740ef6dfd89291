"""``AsyncLLM``: the Python API for asyncio, with any number of concurrent requests.

    llm = AsyncLLM(model="path/to/checkpoint")
    async for delta in llm.stream("Hello", SamplingParams(max_tokens=16)):
        print(delta.text, end="")

The engine runs in a thread of this process, as it does behind ``launch.py serve``.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from labinfer.api.llm import LLM
from labinfer.base.errors import Interrupted, UserError
from labinfer.base.other_engines import as_keywords
from labinfer.base.pooling import EmbeddingOutput
from labinfer.base.sampling_params import SamplingParams
from labinfer.comm.group.failure import end_process_with
from labinfer.requests.embedding import PromptEmbedding
from labinfer.requests.offline_runner import check_can_stream
from labinfer.requests.outputs import Delta, RequestOutput, RequestState
from labinfer.requests.prompts import PromptLike
from labinfer.requests.scoring import Classification, ClassificationOutput, PairScoring, ScoringOutput, pair_scoring
from labinfer.server.host.engine_host import EngineHost
from labinfer.server.host.followers import follow_host
from labinfer.server.host.in_process_connection import DirectCall, InProcessConnection

logger = logging.getLogger(__name__)

MODEL = "model"
"""Name of the only model on the engine host."""


class AsyncLLM:
    """A model that is loaded on the ranks of this launch, for any number of concurrent tasks and event loops.

    Under a launcher all ranks run one script. On ranks other than 0 the constructor takes part in rank 0's steps until
    rank 0 calls ``close``, and then raises ``SystemExit``.

    Args:
        model, options: as for ``LLM``, including ``plugins``; loading blocks the calling thread.

    Raises:
        UserError: an option, the model or the layout is invalid; raised on every rank.
    """

    def __init__(self, model: str = "demo", **options: Any):
        self._llm = llm = LLM(model, **options)
        if not llm.is_rank0:
            follow_host([llm])
            llm.close()
            raise SystemExit
        self._link, self._keys = InProcessConnection(), itertools.count()
        self._ending, self._failure = threading.Event(), ""
        self._prompts = ThreadPoolExecutor(1, "prompts")  # tokenizing a long prompt would block an event loop
        host = EngineHost({MODEL: llm}, self._link, self._check, drain_seconds=0.0)
        self._thread = threading.Thread(target=self._run, args=(host,), name="engine", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        atexit.register(self._close)  # a notebook may end without ``close``

    async def stream(self, prompt: PromptLike, sampling_params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """Yield the deltas of a prompt's answers as they are generated. Leaving the loop aborts the request.

        Args:
            prompt: text, token ids, messages of a conversation, or a dictionary; see ``PromptLike``.

        Raises:
            UserError: the prompt or a parameter is invalid; or the AsyncLLM was closed before or during the call.
        """
        async with aclosing(self._items(prompt, sampling_params, streams=True)) as items:
            async for item in items:
                if isinstance(item, Delta):
                    yield item

    async def generate(self, prompt: PromptLike, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Generate the whole output of a prompt. Cancelling the task aborts the request. For arguments and errors see
        ``stream``."""
        async with aclosing(self._items(prompt, sampling_params)) as items:
            return await anext(items)

    async def chat(
        self, messages: list[dict[str, Any]], sampling_params: SamplingParams | None = None, **fields: Any
    ) -> RequestOutput:
        """Answer a conversation. ``fields`` are further fields of the prompt, as in ``LLM.chat``. To stream an answer, pass the
        messages to ``stream``."""
        return await self.generate({**fields, "messages": messages}, sampling_params)

    async def embed(
        self, prompt: PromptLike, pooling: str | None = None, normalize: bool | None = None, **options: Any
    ) -> EmbeddingOutput:
        """Compute the embedding of a prompt; see ``LLM.embed``."""
        options |= {"pooling": pooling, "normalize": normalize}
        (output,) = await self._pool(PromptEmbedding(model=self._llm.spec, given=[prompt], **options))
        return output

    async def score(self, queries: str | list[str], documents: str | list[str], **options: Any) -> list[ScoringOutput]:
        """Score pairs of texts; see ``LLM.score``."""
        return await self._pool(pair_scoring(self._llm.spec, queries, documents, **options))

    async def classify(self, prompt: PromptLike, *, use_activation: bool | None = None) -> ClassificationOutput:
        """Compute the scores of a classifier's labels for a prompt; see ``LLM.classify``."""
        work = Classification(model=self._llm.spec, given=[prompt], use_activation=use_activation)
        (output,) = await self._pool(work)
        return output

    async def _pool(self, work: PairScoring | Classification | PromptEmbedding) -> list:
        """Run the prompts of ``work`` at the same time, and return its outputs."""

        async def pool(prompt: PromptLike) -> EmbeddingOutput:
            async with aclosing(self._items(prompt, None, pooling=work.pooled_by)) as items:
                return await anext(items)

        return work.outputs(await asyncio.gather(*map(pool, work.prompts())))

    async def close(self) -> None:
        """Abort open requests, end the engine's thread, and leave the group of ranks. The AsyncLLM is unusable
        afterwards."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind, error, traceback) -> None:
        await self.close()

    async def _items(
        self, prompt: PromptLike, sampling_params: SamplingParams | None, *, streams: bool = False, pooling: str = ""
    ) -> AsyncIterator[Delta | RequestOutput | EmbeddingOutput]:
        """Yield the deltas of a request's answers if ``streams``, and then the output of the request."""
        self._check_usable()
        loop = asyncio.get_running_loop()
        items: asyncio.Queue = asyncio.Queue()
        key, sampling = str(next(self._keys)), sampling_params or SamplingParams()
        prepare = functools.partial(self._llm.inputs.read, key, prompt, sampling, pooling=pooling)
        try:
            request = await loop.run_in_executor(self._prompts, prepare)
        except UserError as error:
            raise type(error)(as_keywords(str(error))) from None
        if streams:
            check_can_stream(request)
        state = RequestState(request, self._llm.tokenizer, streams, self._llm.clock)
        take = functools.partial(loop.call_soon_threadsafe, items.put_nowait)
        self._link.start(MODEL, DirectCall(state, streams, take))
        try:
            self._check_usable()  # checked again: ``close`` may have been called during tokenization
            while True:
                item = await items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if not isinstance(item, Delta):
                    return
        finally:
            self._link.abort(key)

    def _check_usable(self) -> None:
        self._llm.check_usable()
        if self._ending.is_set():
            raise UserError("this AsyncLLM is closed; create a new one")
        if self._failure:
            raise RuntimeError(self._failure)

    def _close(self) -> None:
        if self._ending.is_set() or os.getpid() != self._process:
            return
        self._ending.set()
        atexit.unregister(self._close)
        self._link.abort_all(UserError("this AsyncLLM was closed before the output was complete"))
        self._link.wake()
        self._thread.join()
        self._prompts.shutdown()
        if not self._failure:
            self._llm.end_run()
            self._llm.close()

    # Methods of the engine's thread.

    def _run(self, host: EngineHost) -> None:
        try:
            self._llm.use_device()
            host.run()
        except BaseException as error:  # noqa: BLE001 - all waiting callers receive the error
            if self._llm.group.size > 1:
                end_process_with(error, self._llm.group)
            self._failure = f"the engine has failed with {type(error).__name__}: {error}; create a new AsyncLLM"
            logger.exception("the engine has failed")
            self._link.abort_all(RuntimeError(self._failure))

    def _check(self) -> None:
        """End the engine host if this AsyncLLM is closing.

        Raises:
            Interrupted: the AsyncLLM is closing and all requests are aborted.
        """
        if self._ending.is_set() and self._link.is_empty:
            raise Interrupted(0)
