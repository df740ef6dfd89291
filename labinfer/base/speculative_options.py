"""SpeculativeOptions: options of speculative decoding (``--speculative-config``), with vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from labinfer.base.errors import UserError
from labinfer.base.registry import REGISTRY

NGRAM = "ngram"
DRAFT_MODEL = "draft_model"
MTP = "mtp"
OWN_METHOD = ".py"
"""Suffix by which a value of ``method`` is recognized as the path of the user's own drafter."""
AUTO = "auto"
AUTO_TOKENS = 16
"""Maximum draft length if the user sets none."""
AUTO_MTP_TOKENS = 4
"""Maximum draft length of an MTP layer if the user sets none. The layer runs once per drafted token, and was trained to
predict one."""
MAX_TOKENS = 128
"""Upper limit of ``num_speculative_tokens``; a draft of this length is hardly ever accepted as a whole."""
MAX_NGRAM = 64
MAX_RANK = 1_000_000
FLAG = "--speculative-config"


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    """Options of speculative decoding: tokens are drafted, and the model verifies several in one step."""

    method: str = NGRAM
    """Name of a registered proposer, ``draft_model``, or path of a Python file with the user's own drafter; see
    docs/speculation.md."""
    model: str = ""
    """Draft model, named as in ``--model``; makes ``draft_model`` the default method."""
    draft_rank: int = 0
    """Rank that holds the draft model: rank 0, which drafts between its steps, or a spare rank (not in ``--ranks``),
    which drafts while steps run."""
    num_speculative_tokens: int = 0
    """Draft length; 0 to choose it at run time, for the most expected tokens per second."""
    continuous: bool | None = None
    """Whether a sequence may have several drafts in flight: pipeline stages that would be idle verify the later drafts. None means
    True unless all stages compute on CPUs of one machine, where busy stages use the cores of idle ones."""
    prompt_lookup_min: int = 2
    """Minimum length of the n-gram that ``ngram`` looks up."""
    prompt_lookup_max: int = 5
    """Maximum length of the n-gram that ``ngram`` looks up; longer ones draft no better."""

    @property
    def max_tokens(self) -> int:
        """Maximum draft length, in tokens."""
        return self.num_speculative_tokens or (AUTO_MTP_TOKENS if self.method == MTP else AUTO_TOKENS)

    @classmethod
    def parse(cls, value: Any) -> SpeculativeOptions:
        """Parse options from a JSON object, given as text or as a dictionary.

        Raises:
            UserError: a key is unknown, or a value has the wrong type or is out of bounds.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise UserError(
                    f'{FLAG} {value:.60} is not valid JSON; give an object, as in \'{{"method": "ngram"}}\''
                ) from None
        if not isinstance(value, dict):
            raise UserError(f'{FLAG} must be an object, as in {{"method": "ngram"}}, not {value!r:.60}')
        known = [field.name for field in fields(cls)]
        for key in value:
            if key not in known:
                raise UserError(f"{FLAG} has no {key!r:.60}; its keys are {', '.join(known)}")
        given = {key: item for key, item in value.items() if item is not None}
        if "model" in given:
            given.setdefault("method", DRAFT_MODEL)
        if given.get("num_speculative_tokens") == AUTO:
            del given["num_speculative_tokens"]
        elif "num_speculative_tokens" in given:
            _check_number("num_speculative_tokens", given, 1, MAX_TOKENS, ' or "auto"')
        if "draft_rank" in given:
            _check_number("draft_rank", given, 0, MAX_RANK)
        if type(given.get("continuous", True)) is not bool:
            raise UserError(f"{FLAG}: continuous must be true or false, not {given['continuous']!r:.60}")
        for name, other in (("prompt_lookup_min", "prompt_lookup_max"), ("prompt_lookup_max", "prompt_lookup_min")):
            if name in given:
                _check_number(name, given, 1, MAX_NGRAM)
                bound = max if other == "prompt_lookup_max" else min  # the other bound is adjusted if it was not given
                given.setdefault(other, bound(given[name], getattr(cls, other)))
        options = cls(**given)
        options._check()
        return options

    def _check(self) -> None:
        known = (*REGISTRY.names("proposer"), DRAFT_MODEL)
        if not isinstance(self.method, str) or not (self.method in known or self.method.endswith(OWN_METHOD)):
            raise UserError(
                f"{FLAG}: method {self.method!r:.60} is not one of {', '.join(known)}, nor a Python file; choose one"
            )
        if not isinstance(self.model, str) or bool(self.model) != (self.method == DRAFT_MODEL):
            raise UserError(
                f"{FLAG}: model {self.model!r:.60} cannot be combined with method {self.method}; method "
                f"{DRAFT_MODEL} needs a model, the others take none"
            )
        if self.draft_rank and self.method != DRAFT_MODEL:
            raise UserError(
                f"{FLAG}: draft_rank {self.draft_rank} needs method {DRAFT_MODEL}, not {self.method}; leave it out"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise UserError(
                f"{FLAG}: prompt_lookup_min {self.prompt_lookup_min} is more than prompt_lookup_max {self.prompt_lookup_max}"
            )
        if self.method != NGRAM:
            for name in ("prompt_lookup_min", "prompt_lookup_max"):
                if getattr(self, name) != getattr(type(self), name):
                    raise UserError(f"{FLAG}: {name} needs method {NGRAM}, not {self.method}; leave it out")


def _check_number(name: str, values: dict[str, Any], least: int, most: int, instead: str = "") -> None:
    value = values[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UserError(f"{FLAG}: {name} must be a whole number from {least} to {most}{instead}, not {value!r:.60}")
