"""AdmissionControl: admission and rate limits, per caller and for the whole server.

A caller is an API key, or a user within a key (OpenAI's ``user``). The holder of a key is trusted to name its users correctly; the
limit on all open requests does not depend on user names.

The limit of tokens per minute is a token bucket, which holds the budget of one minute and refills steadily. A bucket consists of
two numbers and gives the exact ``Retry-After``; a sliding window would have to store every charge of the last minute. The output
length of a request is unknown at admission. A request is therefore admitted while any budget is left. Its prompt is charged at
once, its output as it is generated. Tokens over the budget become a debt, which refills first. On average no caller exceeds its
tokens per minute, and a prompt of any length can be admitted eventually.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from labinfer.requests.openai import api_errors
from labinfer.server.gateway.access import ApiCaller
from labinfer.server.gateway.options import ServerOptions

WINDOW_SECONDS = 60.0
RETRY_SECONDS = 1.0
"""Default value of the header ``Retry-After``, in seconds."""
LOADING_SECONDS = 5.0
"""Value of the header ``Retry-After`` while models are loaded, in seconds."""
MAX_USER_LENGTH = 256
MAX_REMEMBERED = 4096
"""Maximum number of idle callers (API keys or their users) whose rate-limit debt is kept; of more callers, those with the least
debt are dropped."""
FIRST_SWEEP = 64


class AdmissionControl:
    """Admission and rate limits of requests. Used by one event loop; not thread-safe.

    Args:
        options: the limits; 0 means unlimited.
        clock: monotonic time in seconds.
    """

    def __init__(self, options: ServerOptions, clock: Callable[[], float] = time.monotonic):
        self._max_running = options.max_concurrent_requests
        self._max_waiting = options.max_waiting_per_caller
        self._max_open = options.max_open_requests
        self._budget = options.tokens_per_minute
        self._clock = clock
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._sweep_at = FIRST_SWEEP
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Number of requests that are admitted or waiting for admission."""
        return self._num_open

    @property
    def is_full(self) -> bool:
        """Whether the limit on all open requests is reached, so that every new request would be rejected."""
        return 0 < self._max_open <= self._num_open

    @property
    def num_callers(self) -> int:
        """Number of callers whose open requests and rate-limit debt are kept."""
        return len(self._accounts)

    async def admit(self, caller: ApiCaller, user: str | None, prompt_tokens: int) -> Lease:
        """Admit a request: at once, or in FIFO order when its caller has a free slot.

        If the wait is cancelled, the request no longer counts, and its charge is refunded.

        Args:
            user: end user of the request; every user of a key has separate limits.
            prompt_tokens: tokens to charge at once; 0 if the prompt is not tokenized yet, see ``Lease.charge_prompt``.

        Raises:
            ApiError: 429 if the caller's budget is used up or its queue is full, 503 if the server is full.
        """
        key = (caller.name, (user or "")[:MAX_USER_LENGTH])
        account = self._accounts.get(key) or _Account(key, self._budget, self._clock())
        self._check_budget(account)
        must_wait = 0 < self._max_running <= account.num_running
        if must_wait and len(account.waiting) >= self._max_waiting:
            raise api_errors.rate_limited(self._describe(account), RETRY_SECONDS)
        if self.is_full:
            raise api_errors.overloaded(
                f"the limit of {self._num_open} open requests is reached (--max-open-requests); try again later",
                RETRY_SECONDS,
            )
        self._remember(account)
        self._num_open += 1
        self._charge(account, prompt_tokens)
        if must_wait:
            await self._await_turn(account, prompt_tokens)
        else:
            account.num_running += 1
        return Lease(self, account)

    def _check_budget(self, account: _Account) -> None:
        if self._budget and self._refill(account) <= 0:
            seconds = (1 - account.level) * WINDOW_SECONDS / self._budget  # seconds until one token is available
            raise api_errors.rate_limited(
                f"the rate limit of {self._budget} tokens per minute is reached; try again in {math.ceil(seconds)} s",
                seconds,
                "tokens",
            )

    def _describe(self, account: _Account) -> str:
        text = f"the limit of {account.num_running} concurrent requests per caller is reached"
        if self._max_waiting:
            text += f", and {len(account.waiting)} more are waiting"
        return f"{text}; send the next request when one has finished"

    async def _await_turn(self, account: _Account, prompt_tokens: int) -> None:
        """Wait until another request of ``account`` ends and passes its slot on to this request."""
        turn = asyncio.get_running_loop().create_future()
        account.waiting[turn] = None
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # cancelled although it had got a slot: pass the slot on
                self._pass_slot_on(account)
            else:
                account.waiting.pop(turn, None)
            self._charge(account, -prompt_tokens)
            self._leave(account)
            raise

    def _pass_slot_on(self, account: _Account) -> None:
        """Pass the slot of an ended request on to the account's longest-waiting request; free the slot if none waits."""
        for turn in account.waiting:
            if not turn.done():  # not a cancelled future, which removes itself
                del account.waiting[turn]
                turn.set_result(None)
                return
        account.num_running -= 1

    def _close(self, account: _Account) -> None:
        self._pass_slot_on(account)
        self._leave(account)

    def _leave(self, account: _Account) -> None:
        self._num_open -= 1
        if account.is_idle and self._refill(account) >= self._budget:
            del self._accounts[account.key]

    def _refill(self, account: _Account) -> float:
        """Refill the account's token bucket for the time since the last call, and return the number of tokens in the bucket; a
        negative number is debt."""
        now = self._clock()
        gained = (now - account.updated) * self._budget / WINDOW_SECONDS
        account.level = min(account.level + gained, self._budget)
        account.updated = now
        return account.level

    def _charge(self, account: _Account, tokens: int) -> None:
        if self._budget:
            account.level = min(self._refill(account) - tokens, self._budget)

    def _remember(self, account: _Account) -> None:
        if account.key not in self._accounts and len(self._accounts) >= self._sweep_at:
            self._sweep()
        self._accounts[account.key] = account

    def _sweep(self) -> None:
        """Drop idle accounts with negligible rate-limit debt. Called only when the number of accounts has doubled, so that the
        amortized cost is constant."""
        accounts = [item for item in self._accounts.values() if not item.is_idle or self._refill(item) < self._budget]
        in_debt = sorted((account for account in accounts if account.is_idle), key=lambda account: account.level)
        forgiven = {account.key for account in in_debt[MAX_REMEMBERED:]}
        self._accounts = {account.key: account for account in accounts if account.key not in forgiven}
        self._sweep_at = max(2 * len(self._accounts), FIRST_SWEEP)


class Lease:
    """The slot of an admitted request. Call ``close`` when the request ends, or use the lease as a context manager."""

    __slots__ = ("_limits", "_account", "_is_open")

    def __init__(self, limits: AdmissionControl, account: _Account):
        self._limits, self._account, self._is_open = limits, account, True

    def charge_prompt(self, tokens: int) -> None:
        """Charge the caller for a prompt that was tokenized after admission.

        Raises:
            ApiError: the budget has been used up since admission; nothing is charged.
        """
        self._limits._check_budget(self._account)
        self.spend(tokens)

    def spend(self, tokens: int) -> None:
        """Charge the caller for generated tokens."""
        assert self._is_open, "spend after close"
        self._limits._charge(self._account, tokens)

    def close(self) -> None:
        """Release the request's slot. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._limits._close(self._account)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close()


@dataclass(eq=False)
class _Account:
    """Open requests and token bucket of one caller (an API key, or a user within a key)."""

    key: tuple[str, str]
    level: float
    updated: float
    num_running: int = 0
    waiting: dict[asyncio.Future, None] = field(default_factory=dict)
    """Requests that wait for a slot, first come first served. The future of a request is done when the request has a slot."""

    @property
    def is_idle(self) -> bool:
        return self.num_running == 0 and not self.waiting
