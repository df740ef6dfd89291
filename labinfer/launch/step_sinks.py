"""open_sinks: the step sinks of ``--step-sink``."""

from __future__ import annotations

from collections.abc import Sequence

from labinfer.base.errors import UserError
from labinfer.base.plugins import PLUGINS
from labinfer.base.registry import REGISTRY
from labinfer.comm.spmd.topology import Place
from labinfer.worker.step_sink import StepSinks


def open_sinks(chosen: Sequence[str], place: Place) -> StepSinks:
    """Open the step sinks of a rank.

    Args:
        chosen: values of ``--step-sink``: ``NAME`` or ``NAME=ARGUMENT``.

    Raises:
        UserError: a sink refuses its argument. Sinks that are already open are closed.
    """
    sinks = StepSinks()
    for text in chosen:
        name, _, argument = text.partition("=")
        try:
            with PLUGINS.blame(REGISTRY.entry("step_sink", name).origin):
                sinks.add(REGISTRY.find("step_sink", name)(argument, place))
        except UserError:
            sinks.close()
            raise
    return sinks
