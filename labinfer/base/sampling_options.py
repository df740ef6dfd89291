"""SamplingOptions: the fields of ``SamplingParams`` that are also flags of the command line."""

from __future__ import annotations

import dataclasses
import re
import typing

from labinfer.base.option_fields import flag_name, option
from labinfer.base.sampling_params import SamplingParams, sampling_parameters

SAMPLING_FLAGS = {
    "max_tokens": ("tokens to generate at most", "N"),
    "temperature": ("0 is greedy", "T"),
    "top_p": ("nucleus sampling: the smallest set of tokens with this much probability", "P"),
    "top_k": ("only the k most likely tokens; 0 for all", "K"),
    "min_p": ("only tokens at least this likely, as a fraction of the likeliest", "P"),
    "repetition_penalty": ("above 1, tokens of prompt and answer become less likely", "F"),
    "presence_penalty": ("taken once from the logits of the answer's tokens", "F"),
    "frequency_penalty": ("taken from them for each time they occur", "F"),
    "min_tokens": ("before this many, nothing ends an answer", "N"),
    "n": ("answers to each prompt", "N"),
    "num_beams": ("beam search over so many continuations", "N"),
    "length_penalty": ("above 0, beam search favours longer answers", "F"),
    "seed": ("the same seed gives the same tokens on every layout (fp32)", "N"),
    "stop": ("end before this text; may be given several times", "TEXT"),
    "ignore_eos": ("go on after an end-of-sequence token", ""),
}
"""Fields of ``SamplingParams`` that are flags: help and metavar. Their types, defaults and bounds are those of the field."""
_TYPES = typing.get_type_hints(SamplingParams)
_DEFAULTS = SamplingParams()
SamplingOptions = dataclasses.make_dataclass(
    "SamplingOptions",
    [
        (name, _TYPES[name], option(getattr(_DEFAULTS, name), help, metavar=metavar))
        for name, (help, metavar) in SAMPLING_FLAGS.items()
    ],
    namespace={"__doc__": "Choice of tokens, for requests that do not set their own."},
    frozen=True,
)


def sampling_sections() -> tuple[type, ...]:
    """``SamplingOptions``, and a section with the parameters of plugins' logits processors if there are any."""
    fields = [
        (name, parameter.kind, option(parameter.default, parameter.help, metavar="N" if parameter.kind is int else "X"))
        for name, parameter in sampling_parameters().items()
    ]
    if not fields:
        return (SamplingOptions,)
    text = "Parameters of plugins' logits processors, for requests that do not set their own."
    return SamplingOptions, dataclasses.make_dataclass("PluginSamplingOptions", fields, namespace={"__doc__": text})


def as_flags(message: str) -> str:
    """Rewrite the fields of ``SamplingParams`` in a message as flags: ``top_p must be …`` becomes ``--top-p must be
    …``.

    A field is recognized as the first word, or by its underscore, which no other word has.
    """

    names = {*SAMPLING_FLAGS, *sampling_parameters()}

    def flag(match: re.Match) -> str:
        return flag_name(match[0]) if match[0] in names else match[0]

    return re.sub(r"^[a-z_]+|\b[a-z]+(?:_[a-z]+)+\b", flag, message)
