"""StepSink: contract of plugins that receive a record of every step of a rank, in a job, in ``serve`` and in ``LLM``."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from labinfer.comm.spmd.topology import Place

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step on one rank. Times in seconds."""

    step_id: int
    """Number of the micro-batch; equal on every rank."""
    num_sequences: int
    num_tokens: int
    """Tokens that the step ran, including those of prompts."""
    num_decodes: int
    """Number of decoding sequences."""
    time: float
    """``time.time()`` of this machine at the end of the step."""
    busy: float
    """Time in which the rank prepared, ran and sampled the step. Work on an accelerator may end later."""
    layers: float
    """Part of ``busy`` in which layers ran."""
    waited: float
    """Time spent waiting for the activations of the previous stage; 0 on the first stage."""


class StepSink:
    """Receiver of every step, chosen by ``--step-sink NAME=ARGUMENT``.

    Each rank that holds a part of the model makes one object for each sink and model. Files are written on the rank's own
    machine; ranks that share a folder need distinct file names.

    Args:
        argument: the text after ``NAME=``; empty if there is none.
        place: ``rank``, ``stage`` and ``tp_rank`` of this rank.

    Raises:
        UserError: the argument is wrong; the start ends with this text.
    """

    def __init__(self, argument: str, place: Place):
        self.argument, self.place = argument, place

    def write(self, step: StepRecord) -> None:
        """Called at the end of every step, while the next stage works; its time adds to the step. An exception turns
        the sink off with a warning, and the run continues. Communication between ranks is not allowed here."""
        raise NotImplementedError

    def close(self) -> None:
        """Called when the model is unloaded, or after ``write`` has raised. It is not called in a process that is
        killed: flush data that must not be lost."""


class StepSinks:
    """Sinks of a rank; none at first."""

    def __init__(self):
        self._sinks: list[StepSink] = []

    def add(self, sink: StepSink) -> None:
        """Add a sink."""
        self._sinks.append(sink)

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def write(self, step: StepRecord) -> None:
        """Pass a step to every sink. A sink that raises is turned off."""
        for sink in [*self._sinks]:
            try:
                sink.write(step)
            except Exception as error:  # noqa: BLE001 - a plugin's sink may raise anything
                logger.warning(
                    "warning: the step sink %s failed at step %d and is disabled: %r",
                    type(sink).__name__,
                    step.step_id,
                    error,
                )
                self._sinks.remove(sink)
                _close(sink)

    def close(self) -> None:
        """Close every sink. If one raises, it is logged, and the others are closed."""
        for sink in self._sinks:
            _close(sink)
        self._sinks.clear()


def _close(sink: StepSink) -> None:
    try:
        sink.close()
    except Exception as error:  # noqa: BLE001 - a plugin's sink may raise anything
        logger.warning("warning: the step sink %s failed to close: %r", type(sink).__name__, error)
