"""The table of proposers, by the method of ``--speculative-config``."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from labinfer.base.errors import UserError
from labinfer.base.speculative_options import FLAG, MTP, NGRAM, SpeculativeOptions
from labinfer.engine.facts import EngineFacts
from labinfer.engine.mtp_proposer import MTPProposer
from labinfer.engine.ngram_proposer import NgramProposer
from labinfer.engine.proposer import Proposer

MakeProposer = Callable[[SpeculativeOptions, EngineFacts], Proposer]

PROPOSERS: dict[str, MakeProposer] = {
    NGRAM: lambda options, facts: NgramProposer(options.prompt_lookup_min, options.prompt_lookup_max),
    MTP: lambda options, facts: MTPProposer(),
}
OWN_FUNCTION = "make_proposer"
"""Name of a ``MakeProposer`` in a file of the user's own."""


def find_proposer(options: SpeculativeOptions) -> MakeProposer:
    """Find the maker of a method's proposer.

    Raises:
        UserError: it is in a file of the user's that cannot be used; the text says why.
    """
    path = options.method
    if path in PROPOSERS:
        return PROPOSERS[path]
    if not Path(path).is_file():
        raise UserError(f"{FLAG}: there is no file {path}; give the path of a drafter of your own, or another method")
    digest = hashlib.blake2b(bytes(Path(path).resolve()), digest_size=8).hexdigest()
    spec = importlib.util.spec_from_file_location(f"labinfer_drafter_{digest}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module of a class
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # noqa: BLE001 - it may be anybody's code
        del sys.modules[spec.name]
        raise UserError(f"{FLAG}: {path} cannot be imported: {error!r:.200}") from None
    make = getattr(module, OWN_FUNCTION, None)
    if not callable(make):
        raise UserError(f"{FLAG}: {path} has no function {OWN_FUNCTION}(options, facts); see docs/speculation.md")

    def make_own(options: SpeculativeOptions, facts: EngineFacts) -> Proposer:
        try:
            return make(options, facts)
        except Exception as error:  # noqa: BLE001 - it may be anybody's code
            raise UserError(f"{FLAG}: {path} made no proposer: {error!r:.200}") from None

    return make_own
