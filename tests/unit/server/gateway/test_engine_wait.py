"""The wait that the gateway tells of, from the engine host's signs of life."""

from __future__ import annotations

from labinfer.base.heartbeat import Wait
from labinfer.comm.communicator import name_ranks
from labinfer.comm.progress import Progress
from labinfer.server.gateway.async_llm_engine import AsyncLLMEngine
from labinfer.server.link.frames import Heartbeat, Updates, host_heartbeat


class Link:
    """A host that is heard now and then."""

    silence = 0.0
    is_silent = False

    def note(self, beat: Heartbeat) -> None:
        pass


def test_wait_of_rank_0_is_told_after_some_seconds_until_a_step_ends():
    now = [100.0]
    engine = AsyncLLMEngine(clock=lambda: now[0])
    engine._link = Link()
    engine._take(Heartbeat("…", Wait(rank=0, peers="1", step=481, seconds=2.0)))
    assert engine.wait is None
    now[0] += 10
    assert engine.wait == Wait(rank=0, peers="1", step=481, seconds=12.0)
    engine._take(Updates([]))
    assert engine.wait is None
    engine._link.silence = 7.0
    assert engine.wait == Wait(rank=None, peers="0", step=-1, seconds=7.0)


def test_wait_names_the_ranks_of_a_transfer():
    progress = Progress(rank=2, step_id=7)
    assert host_heartbeat(progress).wait is None
    for what, peers in {
        "the result of step 7 from rank 1 (stage 1, tp 0)": "1",
        f"the sum over {name_ranks([0, 1, 2])}": "0-2",
        f"data from {name_ranks([0, 3])}": "0, 3",
        "rank 12 to receive a command": "12",
    }.items():
        with progress.waiting(what):
            wait = host_heartbeat(progress).wait
            assert (wait.rank, wait.peers, wait.step) == (2, peers, 7) and 0 <= wait.seconds < 5
