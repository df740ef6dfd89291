"""SamplingOptions: the fields of ``SamplingParams`` that are also command-line flags."""

from __future__ import annotations

import dataclasses
import re
import typing

from labinfer.base.option_fields import flag_name, option
from labinfer.base.sampling_params import SamplingParams, sampling_parameters

SAMPLING_FLAGS = {
    "max_tokens": ("maximum number of output tokens", "N"),
    "temperature": ("sampling temperature; 0 is greedy decoding", "T"),
    "top_p": ("nucleus sampling: sample from the smallest set of tokens with this cumulative probability", "P"),
    "top_k": ("sample from the k most likely tokens; 0 for all", "K"),
    "min_p": ("minimum probability of a token, relative to that of the most likely one", "P"),
    "repetition_penalty": ("above 1, tokens that occur in the prompt or the output become less likely", "F"),
    "presence_penalty": ("subtracted from the logits of all tokens that occur in the output", "F"),
    "frequency_penalty": ("subtracted from a token's logit for each occurrence in the output", "F"),
    "min_tokens": (
        "minimum number of output tokens: neither stop strings nor end-of-sequence tokens end the output earlier",
        "N",
    ),
    "n": ("number of outputs per prompt", "N"),
    "num_beams": ("number of beams of a beam search; 1 for none", "N"),
    "length_penalty": ("exponent of the length in a beam's score: larger values favour longer outputs", "F"),
    "seed": ("random seed; in fp32, a seed gives the same tokens on every layout", "N"),
    "stop": ("stop string, at which the output ends; it is not part of the output; repeatable", "TEXT"),
    "ignore_eos": ("continue after end-of-sequence tokens", ""),
}
"""Help and metavar of each field of ``SamplingParams`` that is a flag. Type, default and bounds are those of the field."""
_TYPES = typing.get_type_hints(SamplingParams)
_DEFAULTS = SamplingParams()
SamplingOptions = dataclasses.make_dataclass(
    "SamplingOptions",
    [
        (name, _TYPES[name], option(getattr(_DEFAULTS, name), help, metavar=metavar))
        for name, (help, metavar) in SAMPLING_FLAGS.items()
    ],
    namespace={"__doc__": "Defaults for requests without sampling parameters of their own."},
    frozen=True,
)


def sampling_sections() -> tuple[type, ...]:
    """Sections of sampling flags: ``SamplingOptions``, and one with the parameters of plugins' logits processors if
    there are any."""
    fields = [
        (name, parameter.kind, option(parameter.default, parameter.help, metavar="N" if parameter.kind is int else "X"))
        for name, parameter in sampling_parameters().items()
    ]
    if not fields:
        return (SamplingOptions,)
    text = "Defaults for the parameters of plugins' logits processors."
    return SamplingOptions, dataclasses.make_dataclass("PluginSamplingOptions", fields, namespace={"__doc__": text})


def as_flags(message: str) -> str:
    """Rewrite the fields of ``SamplingParams`` in a message as flags: ``top_p must be …`` becomes ``--top-p must be
    …``.

    A field name is recognized at the beginning of the message, or by its underscore: no other word of a message has
    one.
    """

    names = {*SAMPLING_FLAGS, *sampling_parameters()}

    def flag(match: re.Match) -> str:
        return flag_name(match[0]) if match[0] in names else match[0]

    return re.sub(r"^[a-z_]+|\b[a-z]+(?:_[a-z]+)+\b", flag, message)
