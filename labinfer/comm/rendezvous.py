"""A namespace of the rendezvous store that belongs to the ranks that are here now."""

from __future__ import annotations

import secrets
import time

import torch.distributed as dist

LOOK_SECONDS = 0.02
"""Rank 0 looks so often who has come."""


def fresh_namespace(store: dist.Store, rank: int, world_size: int, timeout: float) -> dist.Store:
    """A namespace of ``store`` that no earlier ranks have used; collective. torchrun keeps the store when it starts its workers again
    (``--max-restarts``), and with it the addresses of those that have died.

    Every rank leaves a name that is only its own. Rank 0 hands the namespace to whomever it finds there, dead or alive, until
    all have answered from within the namespace.

    Args:
        timeout: seconds.

    Raises:
        RuntimeError: not all have come in time.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"come/{rank}", own)
        namespace = dist.PrefixStore(store.get(f"part/{own}").decode(), store)
        namespace.set(f"here/{rank}", "")
        return namespace
    namespace, missing, deadline = dist.PrefixStore(own, store), list(range(1, world_size)), time.monotonic() + timeout
    while missing := [rank for rank in missing if not namespace.check([f"here/{rank}"])]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no word from {', '.join(f'rank {rank}' for rank in missing)} in {timeout:g} s")
        for name in (f"come/{rank}" for rank in missing):
            if store.check([name]):
                store.set(f"part/{store.get(name).decode()}", own)
        time.sleep(LOOK_SECONDS)
    return namespace
