"""Messages that go directly between accelerators, and those through host memory."""

from __future__ import annotations

import torch

from labinfer.comm.local import LocalCommunicator
from labinfer.comm.routed import RoutedCommunicator

DIRECT = (1, 3)


def test_each_message_takes_the_route_of_its_peer():
    def work(comm):
        host, direct = comm.split([range(comm.size)]), comm.split([DIRECT, (0, 2)])
        used: list[str] = []
        for name, user in (("host", host), ("direct", direct)):
            user.irecv = lambda tensor, source, name=name, receive=user.irecv: (
                used.append(name) or receive(tensor, source)
            )
        routed = RoutedCommunicator(host, direct, DIRECT) if comm.rank in DIRECT else host
        peers = [rank for rank in range(comm.size) if rank != comm.rank]
        direct.memory = lambda peer: "npu"
        in_memory = {peer: routed.memory(peer) for peer in peers}
        assert in_memory == {peer: "npu" if {comm.rank, peer} == set(DIRECT) else "cpu" for peer in peers}
        message = torch.tensor([10.0 + comm.rank])
        sends = routed.isend_after(b"headers!", message, peers)
        texts = []
        for peer in peers:
            buffer = torch.zeros(12, dtype=torch.uint8)
            routed.irecv(buffer, peer).wait(f"data from rank {peer}")
            texts.append((bytes(buffer[:8].tolist()), buffer[8:].view(torch.float32).item()))
        for send in sends:
            send.wait("room")
        routed.isend(message, peers[-1]).wait("room")
        assert texts == [(b"headers!", 10.0 + peer) for peer in peers]
        assert routed.all_gather(message) == [torch.tensor([10.0 + rank]) for rank in range(comm.size)]
        return dict(zip(peers, used[: len(peers)], strict=True))

    routes = LocalCommunicator.run(4, work)
    direct = {(rank, peer) for rank, by_peer in enumerate(routes) for peer, name in by_peer.items() if name == "direct"}
    assert direct == {(1, 3), (3, 1)}
