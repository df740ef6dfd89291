"""find_proposer: looks up the proposer of a method, which is shipped, from a plugin, or in a Python file of the user."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError
from labinfer.base.plugins import describe_error, locate, read_file, run_file
from labinfer.base.registry import REGISTRY
from labinfer.base.speculative_options import FLAG, OWN_METHOD, SpeculativeOptions
from labinfer.engine.proposer import MakeProposer, Proposer
from labinfer.engine.spec import EngineSpec

OWN_FUNCTION = "make_proposer"
"""Name of the ``MakeProposer`` in a Python file that ``--speculative-config`` gives as its method."""


def find_proposer(options: SpeculativeOptions) -> MakeProposer:
    """Find the factory of a method's proposer, on rank 0.

    Raises:
        UserError: the method is unknown, or its file cannot be used; the text says why. The factory raises it, too, if
            it fails.
    """
    is_file = options.method.endswith(OWN_METHOD)
    make = _read_maker(options.method) if is_file else REGISTRY.find("proposer", options.method)

    def make_proposer(options: SpeculativeOptions, spec: EngineSpec) -> Proposer:
        try:
            return make(options, spec)
        except Exception as error:  # noqa: BLE001 - the user's file may raise anything
            raise UserError(
                f"{FLAG}: {locate(error, source_path(make))} failed to create a proposer: {describe_error(error)}"
            ) from error

    return make_proposer


def source_path(part: Any) -> str:
    """Path of the file that defines a function or class."""
    module = getattr(part, "__module__", None) or type(part).__module__
    return getattr(sys.modules.get(module), "__file__", None) or module


def _read_maker(path: str) -> MakeProposer:
    """Load the function ``OWN_FUNCTION`` from a file."""
    if not Path(path).is_file():
        raise UserError(f"{FLAG}: file {path} does not exist; give the path of your own drafter, or another method")
    source = read_file(FLAG, Path(path))
    try:
        module = run_file(source)
    except (Exception, SystemExit) as error:
        raise UserError(f"{FLAG}: {locate(error, source.path)} cannot be imported: {describe_error(error)}") from error
    make = getattr(module, OWN_FUNCTION, None)
    if not callable(make):
        raise UserError(f"{FLAG}: {path} has no function {OWN_FUNCTION}(options, spec); see docs/speculation.md")
    return make
