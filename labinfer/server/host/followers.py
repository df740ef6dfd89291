"""follow_host: the loop of ranks other than 0 while an engine host runs on rank 0."""

from __future__ import annotations

import msgspec

from labinfer.api.llm import LLM, follow_all


def follow_host(llms: list[LLM]) -> None:
    """Take part in the steps of rank 0's engines until the engine host ends, and send stats when rank 0 asks for them.
    Spare ranks without a draft model return at once.

    Args:
        llms: all models of the group.
    """
    if llms[0].is_spare:
        follow_all(llms)
        return
    health_channel, reporters = llms[0].group.health_channel, [llm.stats for llm in llms]
    health_channel.make_stats = lambda num_slices: msgspec.msgpack.encode(
        [reporter.report(num_slices) for reporter in reporters]
    )
    follow_all(llms)
    health_channel.make_stats = lambda num_slices: b""
