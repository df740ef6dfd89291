"""StepSink: what a rank writes of every step that it runs, in a job, in ``serve`` and in ``LLM`` alike."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from labinfer.comm.spmd.topology import Place

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step on one rank. Times in seconds."""

    step_id: int
    """Number of the micro-batch, the same on every rank."""
    num_sequences: int
    num_tokens: int
    """Tokens that the step ran, those of prompts included."""
    num_decodes: int
    """Sequences that generate."""
    time: float
    """``time.time()`` of this machine at the end of the step."""
    busy: float
    """Time in which the rank prepared, ran and sampled the step. Work on an accelerator may end later."""
    layers: float
    """Part of ``busy`` in which it ran layers."""
    waited: float
    """Time in which it waited for the activations of the stage before it; 0 on the first stage."""


class StepSink:
    """Receiver of every step, chosen by ``--step-sink NAME=ARGUMENT``.

    Each rank that holds a part of the model makes one object for each sink and model. A file is thus written on the rank's own
    machine, and ranks that share a folder need names of their own.

    Args:
        argument: the text after ``NAME=``; empty if there is none.
        place: ``rank``, ``stage`` and ``tp_rank`` of this rank.

    Raises:
        UserError: the argument is wrong; the start ends with this text.
    """

    def __init__(self, argument: str, place: Place):
        self.argument, self.place = argument, place

    def write(self, step: StepRecord) -> None:
        """Called at the end of every step, while the next stage works; what it takes is added to the step. An exception turns the
        sink off with a warning, and the run goes on. Communication between ranks is not allowed here."""
        raise NotImplementedError

    def close(self) -> None:
        """Called when the model is unloaded, or after ``write`` has raised. A process that is killed calls nothing: flush what must not be lost."""


class StepSinks:
    """The sinks of a rank, none at first."""

    def __init__(self):
        self._sinks: list[StepSink] = []

    def add(self, sink: StepSink) -> None:
        """Write to one more sink from now on."""
        self._sinks.append(sink)

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def write(self, step: StepRecord) -> None:
        """Hand a step to every sink. One that raises is turned off."""
        for sink in [*self._sinks]:
            try:
                sink.write(step)
            except Exception as error:  # noqa: BLE001 - it may be anybody's code
                logger.warning(
                    "warning: the step sink %s failed at step %d and is off from now on: %r",
                    type(sink).__name__,
                    step.step_id,
                    error,
                )
                self._sinks.remove(sink)
                _close(sink)

    def close(self) -> None:
        """Close every sink. One that raises is named, and the others are closed, too."""
        for sink in self._sinks:
            _close(sink)
        self._sinks.clear()


def _close(sink: StepSink) -> None:
    try:
        sink.close()
    except Exception as error:  # noqa: BLE001 - it may be anybody's code
        logger.warning("warning: the step sink %s failed to close: %r", type(sink).__name__, error)
