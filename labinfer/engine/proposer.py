"""Proposer: drafts the next tokens of sequences, which the model then verifies several at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.engine.sequence import Sequence
from labinfer.engine.spec import EngineSpec


class Proposer(Protocol):
    """Drafts tokens of sequences that decode (speculative decoding, Leviathan et al. 2023, arXiv:2211.17192).

    ``@register("proposer", NAME)`` decorates a function or class that is called as ``make(options, spec)`` and gives a proposer, once
    for each model, on rank 0, after the ranks have loaded it: ``options`` is the ``SpeculativeOptions``, ``spec`` has the numbers of the
    model, such as ``spec.vocab_size``. ``--speculative-config '{"method": NAME}'`` chooses it.

    Only rank 0 calls a proposer, between steps, so its time is added to that of a step. A draft costs time if it is rejected, and never
    changes an answer: a drafted token counts only where the same one is sampled. So a proposer may keep what it likes, and draw random
    numbers. It imports no torch unless it needs it. One that raises, or gives something that is no list of token ids for each sequence, is
    named in the log and not called again; requests go on without drafts.

    A proposer that only hands on what came with the sampled tokens has ``drafts_with_samples = True``.
    """

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """For each sequence, tokens that may follow ``sequence.token_ids`` (the prompt and the answer so far), likeliest first in time;
        ``[]`` for no draft.

        Called before each step that runs sequences which may have drafts. The last ``sequence.num_unverified`` tokens of a sequence are
        drafted ones on their way through the stages, as if they were accepted: at the next call other ones may be there. Sequences are
        not to be changed, which is asserted of their length, and may serve as keys until ``forget``.

        Args:
            limits: the most tokens that are of use, for each sequence; at least 1. Longer drafts are cut.
        """
        ...

    def forget(self, sequences: list[Sequence]) -> None:
        """Drop what is kept of sequences that have ended. Called once for each sequence, also for those that were never drafted for."""
        ...


MakeProposer = Callable[[SpeculativeOptions, EngineSpec], Proposer]
