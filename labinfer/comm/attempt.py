"""The part of a store that belongs to the ranks that are here now."""

from __future__ import annotations

import secrets
import time

import torch.distributed as dist

LOOK_SECONDS = 0.02
"""Rank 0 looks so often who has come."""


def own_part(store: dist.Store, rank: int, world_size: int, timeout: float) -> dist.Store:
    """A part of ``store`` that no earlier ranks have used; collective. torchrun keeps the store when it starts its workers again
    (``--max-restarts``), and with it the addresses of those that have died.

    Every rank leaves a name that is only its own. Rank 0 hands the part's name to whomever it finds there, dead or alive, until
    all have answered from within the part.

    Args:
        timeout: seconds.

    Raises:
        RuntimeError: not all have come in time.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"come/{rank}", own)
        part = dist.PrefixStore(store.get(f"part/{own}").decode(), store)
        part.set(f"here/{rank}", "")
        return part
    part, missing, deadline = dist.PrefixStore(own, store), list(range(1, world_size)), time.monotonic() + timeout
    while missing := [rank for rank in missing if not part.check([f"here/{rank}"])]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no word from {', '.join(f'rank {rank}' for rank in missing)} in {timeout:g} s")
        for name in (f"come/{rank}" for rank in missing):
            if store.check([name]):
                store.set(f"part/{store.get(name).decode()}", own)
        time.sleep(LOOK_SECONDS)
    return part
