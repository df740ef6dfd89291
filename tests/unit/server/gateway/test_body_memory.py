"""Long bodies in memory at once are bounded, for each caller and for all; short ones always pass."""

from __future__ import annotations

from labinfer.server.gateway.body_memory import FREE_BYTES, BodyMemory
from labinfer.server.gateway.options import ServerOptions
from tests.refusals import refused

MIB = 1 << 20


def filled(memory: BodyMemory, caller: str, num_mib: int):
    lease = memory.lease(caller)
    for _ in range(num_mib):
        lease.grow(MIB)
    return lease


def test_caller_has_half_of_the_memory_and_all_have_the_whole():
    memory = BodyMemory(ServerOptions(max_body_memory=8, max_body_size=2))
    leases = [filled(memory, "ann", 2) for _ in range(2)]
    assert not memory.is_full
    with refused(429, match="--max-body-memory"):
        filled(memory, "ann", 1)
    leases += [filled(memory, "bob", 2) for _ in range(2)]
    assert memory.is_full
    with refused(503, match="--max-body-memory"):
        filled(memory, "carol", 1)
    for _ in range(100):  # what is short passes whatever is there
        memory.lease("ann").grow(FREE_BYTES)
    for lease in leases:
        lease.close()
        lease.close()
    assert not memory.is_full
    filled(memory, "carol", 4).close()


def test_one_body_as_long_as_may_be_always_has_room():
    filled(BodyMemory(ServerOptions(max_body_memory=1, max_body_size=16)), "ann", 16)


def test_refused_bytes_are_not_counted():
    memory = BodyMemory(ServerOptions(max_body_memory=8, max_body_size=2))
    lease = filled(memory, "ann", 4)
    with refused(429):
        lease.grow(MIB)
    lease.close()
    filled(memory, "ann", 4)
