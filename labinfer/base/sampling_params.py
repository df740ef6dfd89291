"""SamplingParams: sampling parameters of a request. Every bound is stated here once.

The fields of HTTP bodies and JSONL lines (``protocol.py``), the flags (``sampling_options.py``) and the bounds in ``/openapi.json``
are derived from ``SamplingParams``.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.json_depth import MAX_DEPTH, exceeds_max_depth
from labinfer.base.registry import REGISTRY
from labinfer.base.structured_outputs import StructuredOutputs

MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
GREEDY_BELOW = 1e-5
"""Temperature below which sampling is greedy: division by it could overflow, and the sampled token would be the
likeliest one anyway."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_BAD_WORDS = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 128
FORMS = StructuredOutputs.__struct_fields__
OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "max_length": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "num_return_sequences": "n",
    "do_sample": "temperature, which is 0 for greedy decoding",
    "use_beam_search": "num_beams",
    "beam_width": "num_beams",
    "max_completion_tokens": "max_tokens",
    "stop_strings": "stop",
    "extra_args": "logits_processors, by the name of a plugin's",
    "vllm_xargs": "logits_processors, by the name of a plugin's",
    "guided_decoding": "structured_outputs",
    "guided_json": 'structured_outputs with "json"',
    "guided_regex": 'structured_outputs with "regex"',
    "guided_choice": 'structured_outputs with "choice"',
    "guided_grammar": 'structured_outputs with "grammar"',
}
"""Unknown name → hint that begins with the field of ``SamplingParams`` for which other engines, or earlier versions of vLLM, use that name."""
TINY = 1e-300
"""Lower bound of parameters that must be above 0, such as ``top_p``."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number: its minimum and maximum."""

    least: float
    most: float
    text: str = ""
    """The bounds in words, for errors; by default "from … to …"."""

    def check(self, name: str, kind: type, value: Any) -> None:
        """Reject a value of another type, or out of bounds. NaN is out of bounds.

        Raises:
            UserError: the text names the field and its bounds.
        """
        if isinstance(value, bool) or not isinstance(value, (int, kind)):
            raise UserError(f"{name} must be a number, not {value!r:.60}")
        if not self.least <= value <= self.most:
            raise UserError(f"{name} must be {self.text or f'from {self.least:g} to {self.most:g}'}, not {value}")


@dataclass(frozen=True)
class TextBounds:
    """Bounds of a list of strings: maximum number of strings, and maximum characters of each. Empty strings are
    rejected."""

    most: int
    longest: int

    def check(self, name: str, texts: tuple[str, ...]) -> None:
        """Reject too many strings, and strings that are empty or too long.

        Raises:
            UserError: the text names the field and its bounds.
        """
        if len(texts) > self.most:
            raise UserError(f"{name} may have {self.most} strings at most, not {len(texts)}")
        for text in texts:
            if not 0 < len(text) <= self.longest:
                raise UserError(f"{name}: a string must have 1 to {self.longest} characters, not {text!r:.60}")


class SamplingParameter(msgspec.Struct, frozen=True, kw_only=True):
    """A number that requests give to a plugin's logits processor, in a field with the processor's name.

    The field can be set wherever those of ``SamplingParams`` can: in Python, JSONL lines, HTTP bodies and
    ``/openapi.json``, as a flag of ``generate`` and ``chat``, and in the settings of a chat.
    ``SamplingParams.logits_processors`` holds its value.

    Args:
        default: value of requests without the field; the processor is then not called. An ``int`` allows integers only,
            a ``float`` any number.
        least, most: minimum and maximum of the value.
        help: description for ``--help`` and ``/openapi.json``.

    Raises:
        UserError: the default is not a number, or out of bounds.
    """

    default: int | float
    least: float
    most: float
    help: str

    def __post_init__(self) -> None:
        if self.kind not in (int, float):
            raise UserError(f"the default of a sampling parameter must be an int or a float, not {self.default!r:.60}")
        if not -math.inf < self.least <= self.most < math.inf:
            raise UserError(f"a sampling parameter cannot have bounds from {self.least!r:.40} to {self.most!r:.40}")
        self.read("the default of a sampling parameter", self.default)

    @property
    def kind(self) -> type:
        """Type of the parameter, ``int`` or ``float``."""
        return type(self.default)

    def read(self, name: str, value: Any) -> int | float:
        """Convert a value to ``kind``.

        Raises:
            UserError: the value is not a number, or out of bounds.
        """
        if self.kind is int and isinstance(value, float):
            if not float.is_integer(value):
                raise UserError(f"{name} must be a whole number, not {value}")
            value = int(value)
        Bounds(self.least, self.most).check(name, self.kind, value)
        return self.kind(value)


def sampling_parameters() -> dict[str, SamplingParameter]:
    """Sampling parameters that plugins' logits processors have registered, by name."""
    entries = REGISTRY.plugged_in("logits_processor")
    return {name: entry.details["parameter"] for name, entry in entries.items() if "parameter" in entry.details}


class _TakesParameters(type(msgspec.Struct)):
    """Metaclass that also accepts ``sampling_parameters`` as keyword arguments: ``SamplingParams(top_n_sigma=1.0)``."""

    def __call__(cls, **fields: Any) -> Any:
        own = {name: fields.pop(name) for name in sampling_parameters() if name in fields}
        if own and isinstance(given := fields.get("logits_processors", {}), dict):
            fields["logits_processors"] = given | own
        if unknown := sorted(fields.keys() - {*cls.__struct_fields__}):
            raise TypeError(_describe_unknown(unknown[0], cls.__struct_fields__))
        return super().__call__(**fields)


def _describe_unknown(name: str, known: tuple[str, ...]) -> str:
    """Error text for the keyword ``name``, which is not a field of ``SamplingParams``; suggests a similar field, if
    any."""
    near = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, 1)), "")
    return f"SamplingParams has no field {name!r:.60}" + (f"; did you mean {near}?" if near else "")


Count = Annotated[int, Bounds(0, MAX_COUNT, f"from 0 to {MAX_COUNT}")]
Choices = Annotated[int, Bounds(1, MAX_CHOICES)]
Share = Annotated[float, Bounds(TINY, 1.0, "above 0 and at most 1")]
Penalty = Annotated[float, Bounds(-2.0, 2.0)]
NumLogprobs = Annotated[int, Bounds(0, MAX_LOGPROBS)]
BIAS = Bounds(-100.0, 100.0)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_TakesParameters):
    """Sampling parameters of one request. Names and meanings are those of vLLM and Transformers.
    ``sampling_parameters`` of plugins are further keywords.

    Logits processors are applied first, then temperature, then the candidate filters top-k, top-p, min-p and typical-p,
    each to the tokens that the previous one kept.

    Raises:
        UserError: a field is out of its bounds.
    """

    max_tokens: Annotated[int, Bounds(1, MAX_COUNT, f"at least 1 (and at most {MAX_COUNT})")] = 128
    """Maximum number of output tokens."""
    min_tokens: Count = 0
    """Minimum number of output tokens: a shorter answer does not end at a stop string or stop token."""
    temperature: Annotated[float, Bounds(0.0, 100.0)] = 0.0
    """Divisor of the logits; 0 is greedy, as is any value below ``GREEDY_BELOW``."""
    top_p: Share = 1.0
    """Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751): keep the smallest set of the likeliest tokens whose total
    probability is at least ``top_p``."""
    top_k: Annotated[int, Bounds(-1, MAX_COUNT, f"-1 (all), 0 (all) or a count up to {MAX_COUNT}")] = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Keep tokens with a probability of at least ``min_p`` times the largest one (Nguyen et al. 2024, arXiv:2407.01082)."""
    typical_p: Share = 1.0
    """Locally typical sampling (Meister et al. 2022, arXiv:2202.00666): keep the smallest set of the most typical tokens whose
    total probability is at least ``typical_p``."""
    repetition_penalty: Annotated[float, Bounds(0.01, 100.0)] = 1.0
    """Factor that penalizes tokens of prompt and answer: it divides their positive logits, and multiplies their
    negative ones (arXiv:1909.05858)."""
    presence_penalty: Penalty = 0.0
    """Value that is subtracted once from the logit of each token that the answer contains."""
    frequency_penalty: Penalty = 0.0
    """Value that is subtracted from the logit of a token for each time that the answer contains the token."""
    logit_bias: dict[int, float] = {}
    """Values that are added to logits, by token id."""
    bad_words: Annotated[tuple[str, ...], TextBounds(MAX_BAD_WORDS, MAX_STOP_LENGTH)] = ()
    """Strings that are never generated."""
    allowed_token_ids: tuple[int, ...] = ()
    """Token ids that may be generated; empty for all."""
    logits_processors: dict[str, Any] = {}
    """Values for plugins' logits processors, by name, in the order in which the processors run; see
    ``SamplingParameter``."""
    seed: Annotated[int, Bounds(0, MAX_SEED, "from 0 to 2**63-1")] = 0
    """Random seed. Equal seeds give equal tokens on every layout and in every batch (in float32)."""
    stop: Annotated[tuple[str, ...], TextBounds(MAX_STOP_STRINGS, MAX_STOP_LENGTH)] = ()
    """Stop strings: generation ends before the first one that occurs."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation, in addition to the end-of-sequence token."""
    include_stop_str_in_output: bool = False
    """Whether the text includes the stop string that ended it."""
    skip_special_tokens: bool = True
    """Whether special tokens are omitted from the text, except those by which chat replies are parsed."""
    speculate: bool = True
    """Whether speculative decoding may be used, if the engine is set up for it. The answer does not depend on it."""
    ignore_eos: bool = False
    """Whether to continue after an end-of-sequence token (for benchmarks)."""
    n: Choices = 1
    """Number of answers to one prompt. The i-th answer's seed is ``seed + i``."""
    best_of: Annotated[int, Bounds(0, MAX_CHOICES)] = 0
    """Number of answers to generate; the ``n`` with the highest mean log-probability are kept. 0 means ``n``."""
    num_beams: Choices = 1
    """Number of beams of beam search. The best ``n`` are the answers, or fewer if constraints allow no more."""
    length_penalty: Annotated[float, Bounds(-10.0, 10.0)] = 1.0
    """Exponent of the length penalty: a beam's score is its log-probability divided by its length to this power. Above
    0 favours longer answers."""
    early_stopping: bool | Literal["never"] = False
    """When beam search ends: once it has as many finished answers as beams (true), once the best unfinished beam is
    unlikely to beat them (false), or once it cannot beat them ("never")."""
    max_context_len: Count = 0
    """Maximum number of tokens of prompt and answer together; with ``--context-shift``, of tokens in the context at one time. 0 for
    the model's context length."""
    logprobs: NumLogprobs | None = None
    """Number of likeliest tokens whose log-probabilities are returned in addition to the sampled token's, before any
    logits processor; None for no log-probabilities."""
    prompt_logprobs: NumLogprobs | None = None
    """Number of likeliest tokens whose log-probabilities are returned for each prompt position, in addition to the
    prompt token's own (none for the first). The prompt is then not looked up in the prefix cache. None for no
    log-probabilities."""
    structured_outputs: StructuredOutputs | None = None
    """Constraint on the answer. The answer ends if the constraint allows no more tokens. An end-of-sequence token is
    allowed only if the answer is complete; ``min_tokens`` forbids it as long as the constraint allows other tokens."""

    def __post_init__(self) -> None:
        # msgspec does not convert what Python code passes: LLM users may hand over a string or a list.
        for name, item in (("stop", str), ("bad_words", str), ("allowed_token_ids", int), ("stop_token_ids", int)):
            self._make_tuple(name, item)
        for name, (kind, bounds) in NUMBERS.items():
            value = getattr(self, name)
            if value is not None:
                bounds.check(name, kind, value)
            elif name not in OPTIONAL:
                default = getattr(SamplingParams(), name)
                raise UserError(f"{name} must be a number, not None; leave it out for the default, {default}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be true or false, not {getattr(self, name)!r:.60}")
        if type(self.early_stopping) is not bool and self.early_stopping != "never":
            raise UserError(f'early_stopping must be true, false or "never", not {self.early_stopping!r:.60}')
        if self.structured_outputs is not None:
            self._check_structured()
        if self.num_beams > 1:
            self._check_beams()
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.best_of and self.best_of < self.n:
            raise UserError(f"best_of {self.best_of} is less than n {self.n}")
        for name, text_bounds in TEXTS.items():
            text_bounds.check(name, getattr(self, name))
        _check_bias(self.logit_bias)
        if not isinstance(self.logits_processors, dict):
            raise UserError(f"logits_processors must map names to arguments, not {self.logits_processors!r:.60}")
        if exceeds_max_depth(self.logits_processors):
            raise UserError(f"logits_processors are nested more than {MAX_DEPTH} deep; make them flatter")
        try:
            msgspec.msgpack.encode(self.logits_processors)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UserError(f"logits_processors cannot be sent to the ranks: {error}") from None
        self._read_parameters()

    def _read_parameters(self) -> None:
        """Check the values of ``sampling_parameters`` in ``logits_processors``, and remove those that equal their
        defaults."""
        parameters, changing = sampling_parameters(), {}
        for name, value in self.logits_processors.items():
            if name in parameters:
                value = parameters[name].read(name, value)
                if value == parameters[name].default:
                    continue
            changing[name] = value
        msgspec.structs.force_setattr(self, "logits_processors", changing)

    def updated(self, given: dict[str, Any]) -> SamplingParams:
        """Copy in which the fields ``given`` by a request replace those of ``self``. ``logits_processors`` are merged; a ``seed``
        out of bounds is taken modulo 2**63.

        Raises:
            UserError: a field is out of bounds.
        """
        given = dict(given)
        if "seed" in given:
            given["seed"] %= MAX_SEED + 1
        if "logits_processors" in given:
            given["logits_processors"] = self.logits_processors | given["logits_processors"]
        return msgspec.structs.replace(self, **given)

    def _check_structured(self) -> None:
        if isinstance(self.structured_outputs, dict):
            unknown = sorted(str(key) for key in self.structured_outputs.keys() - set(FORMS))
            if unknown:
                raise UserError(f"structured_outputs has no field {unknown[0]!r}; its fields are {', '.join(FORMS)}")
            msgspec.structs.force_setattr(self, "structured_outputs", StructuredOutputs(**self.structured_outputs))
        if not isinstance(self.structured_outputs, StructuredOutputs):
            raise UserError(f"structured_outputs must be StructuredOutputs, not {self.structured_outputs!r:.60}")
        if self.ignore_eos:
            raise UserError(
                "ignore_eos cannot be combined with structured_outputs, which determine the end of the output; "
                "leave it out"
            )

    def _check_beams(self) -> None:
        if self.n > self.num_beams:
            raise UserError(f"n {self.n} is more than num_beams {self.num_beams}")
        for name, neutral in (
            ("temperature", 0.0),
            ("best_of", 0),
            ("stop", ()),
            ("logprobs", None),
            ("structured_outputs", None),
        ):
            if getattr(self, name) != neutral:
                raise UserError(f"{name} {getattr(self, name)!r:.60} cannot be combined with num_beams; leave it out")

    @property
    def num_choices(self) -> int:
        """Number of sequences generated independently; the best ``n`` are returned. 1 for beam search."""
        return 1 if self.num_beams > 1 else self.best_of or self.n

    @property
    def can_stream(self) -> bool:
        """Whether an answer can be streamed: its first tokens are final before its last one is known."""
        return self.num_beams == 1 and self.num_choices == self.n

    def _make_tuple(self, name: str, item: type) -> None:
        value = getattr(self, name)
        if isinstance(value, item):
            value = (value,)
        elif isinstance(value, list) or value is None:
            value = tuple(value or ())
        what = "a string or a list of strings" if item is str else "a list of token ids"
        if not isinstance(value, tuple) or any(type(part) is not item for part in value):
            raise UserError(f"{name} must be {what}, not {getattr(self, name)!r:.60}")
        if item is int and len(value) > 1:
            value = tuple(dict.fromkeys(value))  # without duplicates, which would only cost time
        msgspec.structs.force_setattr(self, name, value)


def _bounds() -> tuple[dict[str, tuple[type, Bounds]], dict[str, TextBounds], frozenset[str]]:
    """Read from the annotations of ``SamplingParams``: type and bounds of each numeric field, bounds of string lists,
    and names of fields that may be None."""
    numbers, texts, optional = {}, {}, []
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items():
        kinds = get_args(hint)
        if type(None) in kinds:  # ``hint | None``
            hint = kinds[0]
            optional.append(name)
        if get_origin(hint) is not Annotated:
            continue
        kind, bounds = get_args(hint)
        if isinstance(bounds, Bounds):
            numbers[name] = (kind, bounds)
        else:
            texts[name] = bounds
    return numbers, texts, frozenset(optional)


NUMBERS, TEXTS, OPTIONAL = _bounds()
"""Type and bounds of each numeric field, bounds of each field that is a list of strings, and names of the fields that
may be None."""


def _check_bias(bias: Any) -> None:
    if not isinstance(bias, dict):
        raise UserError(f"logit_bias must map token ids to numbers, not {bias!r:.60}")
    for token, value in bias.items():
        if type(token) is not int or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"logit_bias must map token ids to numbers, not {token!r:.40} to {value!r:.40}")
        BIAS.check(f"logit_bias of token {token}", float, value)
