"""fresh_namespace: a namespace of the rendezvous store for the ranks of the current launch."""

from __future__ import annotations

import secrets
import time

import torch.distributed as dist

POLL_SECONDS = 0.02
"""Interval at which rank 0 polls for arrived ranks."""


def fresh_namespace(store: dist.Store, rank: int, world_size: int, timeout: float) -> dist.Store:
    """Namespace of ``store`` that no earlier ranks have used; collective. torchrun keeps the store when it restarts its workers
    (``--max-restarts``), with the addresses of dead ranks.

    Every rank stores a unique name. Rank 0 sends the namespace to every name that it finds, of dead or live ranks, until all ranks have
    answered from within the namespace.

    Args:
        timeout: seconds.

    Raises:
        RuntimeError: some ranks have not answered in time.
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
            raise RuntimeError(f"no message from {', '.join(f'rank {rank}' for rank in missing)} within {timeout:g} s")
        for name in (f"come/{rank}" for rank in missing):
            if store.check([name]):
                store.set(f"part/{store.get(name).decode()}", own)
        time.sleep(POLL_SECONDS)
    return namespace
