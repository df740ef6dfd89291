"""Proposer: interface of speculative decoding's drafters, whose tokens the model verifies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.engine.sequence import Sequence
from labinfer.engine.spec import EngineSpec


class Proposer(Protocol):
    """Drafts tokens of sequences that decode (speculative decoding, Leviathan et al. 2023, arXiv:2211.17192).

    ``@register("proposer", NAME)`` decorates a function or class that is called as ``make(options, spec)`` and returns
    a proposer. Rank 0 calls it once for each model, after the ranks have loaded the model. ``options`` is the
    ``SpeculativeOptions``; ``spec`` describes the model, such as ``spec.vocab_size``. ``--speculative-config
    '{"method": NAME}'`` chooses it.

    Only rank 0 calls a proposer, between steps, so its time adds to the step time. A rejected draft costs time but
    never changes an answer: a drafted token is accepted only if the model samples that token. So a proposer may keep
    state and use random numbers. It imports no torch unless it needs it. A proposer that raises, or returns anything
    but a list of token ids for each sequence, is logged and not called again; requests continue without drafts.

    A proposer whose drafts arrive with the sampled tokens has ``drafts_with_samples = True``.
    """

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Draft the tokens that may follow ``sequence.token_ids`` (prompt and answer so far), in order, for each
        sequence; ``[]`` for no draft.

        Called before each step that runs sequences which may have drafts. The last ``sequence.num_unverified`` tokens
        of a sequence are drafted tokens in flight, treated as accepted; at the next call other tokens may have replaced
        them. A proposer must not change sequences (their length is asserted), but may use them as dictionary keys until
        ``forget``.

        Args:
            limits: maximum useful draft length for each sequence; at least 1. Longer drafts are cut.
        """
        ...

    def forget(self, sequences: list[Sequence]) -> None:
        """Drop the state kept for ended sequences. Called once for each sequence, even if it never had a draft."""
        ...


MakeProposer = Callable[[SpeculativeOptions, EngineSpec], Proposer]
