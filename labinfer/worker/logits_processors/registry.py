"""Logits processors by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from labinfer.base.errors import UserError
from labinfer.base.plan import TokenSampling


class SampledRow(msgspec.Struct, frozen=True):
    """A prefix of a sequence whose next token is to be chosen."""

    sampling: TokenSampling
    token_ids: list[int]
    """The prefix: the prompt, and the answer up to the token that is to be chosen."""
    mask: bytes = b""
    """Tokens that may be chosen, as ``BatchEntry`` has them; empty for any."""

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.sampling.num_prompt_tokens :]


Processor = Callable[[torch.Tensor, Any, SampledRow], None]
"""Changes a row's logits (V), float32, in place; given the request's argument and the sequence."""

BUILT_IN = frozenset(
    (
        "logit_bias",
        "allowed_token_ids",
        "bad_token_ids",
        "min_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
)
"""Processors that a request asks for by a field of ``SamplingParams``, whose bounds are checked there."""

_PROCESSOR_NAME = "_labinfer_processor_name"


def processor(name: str) -> Callable[[Processor], Processor]:
    """Mark a function as the processor of this name."""

    def mark(function: Processor) -> Processor:
        setattr(function, _PROCESSOR_NAME, name)
        return function

    return mark


def find_processors() -> dict[str, Processor]:
    """Every marked function of the files beside this one."""
    package = importlib.import_module(__package__)
    processors: dict[str, Processor] = {}
    for module_info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{__package__}.{module_info.name}")
        for function in vars(module).values():
            name = getattr(function, _PROCESSOR_NAME, None)
            if isinstance(name, str):
                assert processors.setdefault(name, function) is function, f"two processors are called {name!r}"
    return processors


def check_processors(
    requested: Mapping[str, Any], prompt_ids: list[int], vocab_size: int, processors: Mapping[str, Processor]
) -> None:
    """Try a request's own logits processors before any rank has to run them.

    Args:
        requested: their arguments by name.
        processors: the functions by name, as ``find_processors`` gave them when the ranks started.

    Raises:
        UserError: there is none of that name, or it fails with this argument.
    """
    if not requested:
        return
    row = SampledRow(TokenSampling(num_prompt_tokens=len(prompt_ids)), prompt_ids)
    for name, value in requested.items():
        if name not in processors or name in BUILT_IN:
            known = sorted(set(processors) - BUILT_IN)
            raise UserError(f"there is no logits processor {name!r:.60}; there are: {', '.join(known) or 'none'}")
        try:
            processors[name](torch.zeros(vocab_size), value, row)
        except Exception as error:  # noqa: BLE001 - it may be anybody's code
            raise UserError(f"the logits processor {name} refuses {value!r:.60}: {error!r:.200}") from None
