"""GrammarGuideMaker: makes the objects (guides) that compute token masks for structured output, by llguidance.

llguidance (https://github.com/guidance-ai/llguidance) compiles regular expressions, JSON schemas and Lark grammars, and computes
token masks. llguidance has limits for the cost of a grammar. If a grammar exceeds one, only its request fails.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labinfer.base.errors import UserError
from labinfer.base.structured_outputs import StructuredOutputs
from labinfer.text.gbnf import lark_grammar
from labinfer.text.gguf_tokenizer import fast_tokenizer_source
from labinfer.text.json_schema import check_property_counts
from labinfer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_CACHED = 16
"""Maximum number of compiled grammars that are cached. The requests of a job mostly share a few grammars."""
LIMITS = {
    "max_items_in_row": 800,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Limits of llguidance (``LLParserLimits``). The time to compute the mask of an ambiguous grammar is cubic in the number of items
in a row. With 800 items it takes up to 0.3 s on a slow core, and an object may have 198 optional properties. llguidance's default
is 2000 items."""
WHITESPACE = r" |\n[ \t]{0,20}"
"""White space that is allowed between JSON tokens: a space, or a line break with indentation. The indentation is limited, as a
model might write white space forever."""
MAX_PROBLEM = 200
"""Maximum length, in characters, of a quotation of llguidance's error message."""
OWN_MESSAGES = {
    "oneOf constraints are not supported": "alternatives of a oneOf can match the same value, which a grammar cannot exclude; use anyOf, "
    "or require a property in each of them with a constant that no other one has"
}
"""Error messages that replace those of llguidance. Each key is a part of llguidance's message."""


class GuidanceError(Exception):
    """Computing a token mask failed: the grammar allows no further token although the answer is incomplete, or a limit of
    llguidance is exceeded."""


class GrammarGuideMaker:
    """Makes guides: objects that compute the token masks of one answer with structured output. The first guide imports llguidance.

    Args:
        need_tokenizer: returns the checkpoint's tokenizer, or raises the ``UserError`` that says why there is none.
        vocab_size: width of the logits.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(self, need_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Collection[int]):
        self._need_tokenizer, self._vocab_size = need_tokenizer, vocab_size
        self._ends = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._vocabulary: GuidanceVocabulary | None = None
        self._preparing: threading.Thread | None = None
        self._grammars: dict[str, Grammar] = {}  # compiled grammars by source, least recently used first

    def get_ready(self) -> bool:
        """Whether ``make`` can start at once. If not, the tokenizer must be read first, which takes one or two seconds for a large
        vocabulary: starts a thread that reads it. llguidance releases the GIL meanwhile."""
        if self._vocabulary is None and self._preparing is None:
            self._preparing = threading.Thread(target=self._prepare, name="guides", daemon=True)
            self._preparing.start()
        return self._vocabulary is not None or not self._preparing.is_alive()

    def _prepare(self) -> None:
        with contextlib.suppress(UserError):  # ``make`` raises the error again for its caller
            self._vocabulary = GuidanceVocabulary(self._need_tokenizer(), self._vocab_size, self._ends)

    def make(self, form: StructuredOutputs, before: str = "") -> GrammarGuide:
        """Make the guide of an answer that has no tokens yet.

        Args:
            before: grammar rules for text that may precede the structured output; see ``reply_grammar.before_form``.

        Raises:
            UserError: llguidance cannot read this kind of tokenizer; the constraint is invalid or too large, or allows
                no answer.
        """
        if self._vocabulary is None:
            self._vocabulary = GuidanceVocabulary(self._need_tokenizer(), self._vocab_size, self._ends)
        source = grammar_source(form, before)
        grammar = self._grammars.pop(source, None)
        if grammar is None or grammar.has_failed:
            grammar = Grammar(source, self._vocabulary, form.kind)
        self._grammars[source] = grammar
        if len(self._grammars) > MAX_CACHED:
            del self._grammars[next(iter(self._grammars))]
        return GrammarGuide(grammar)


def grammar_source(form: StructuredOutputs, before: str = "") -> str:
    """Convert a structured-output constraint to llguidance's JSON notation: a list of one grammar, or of two if text may precede
    the structured output.

    Raises:
        UserError: no grammar can enforce the constraint.
    """
    grammar: dict[str, Any]
    if form.regex is not None:
        from llguidance import LLMatcher

        grammar = json.loads(LLMatcher.grammar_from_regex(form.regex))["grammars"][0]
    elif form.grammar is not None:
        grammar = {"lark_grammar": lark_grammar(form.grammar)}
    elif form.choice is not None:
        # One terminal for each string, as one string may begin with another. String literals of Lark are those of JSON.
        strings = " | ".join(json.dumps(text).replace("\x7f", "\\u007f") for text in form.choice)
        grammar = {"lark_grammar": f"start: CHOICE\nCHOICE: {strings}"}
    else:
        schema = {"type": "object"} if form.json is None else form.json
        check_property_counts(schema, "structured_outputs.json")
        options = schema.get("x-guidance")
        own = options if isinstance(options, dict) else {}
        grammar = {"json_schema": schema | {"x-guidance": {"whitespace_pattern": WHITESPACE} | own}}
    if not before:
        return json.dumps({"grammars": [grammar]})
    outer = {"lark_grammar": f"start: before @form\n{before}"}
    return json.dumps({"grammars": [outer, grammar | {"name": "form"}]})


def need_json_file(tokenizer: Tokenizer) -> Path:
    """Path of the ``tokenizer.json``, from which llguidance reads the vocabulary.

    Raises:
        UserError: the tokenizer does not come from such a file.
    """
    if tokenizer.json_file is None:
        raise UserError(
            "structured_outputs needs a tokenizer.json, but the checkpoint has only SentencePiece's "
            "tokenizer.model; give --tokenizer DIR with a tokenizer.json"
        )
    return tokenizer.json_file


class GuidanceVocabulary:
    """A checkpoint's vocabulary as llguidance needs it. Computes token masks as the engine needs them.

    Args:
        vocab_size: width of the logits; ids beyond it are never allowed.
        ends: ids of the tokens that end an answer; they never match text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: list[int]):
        from llguidance import LLParserLimits, LLTokenizer

        json_file = need_json_file(tokenizer)
        if not ends:
            raise UserError(
                "structured_outputs needs an end-of-sequence token, but the checkpoint's config.json names none; "
                "add eos_token_id"
            )
        try:
            self.tokenizer: LLTokenizer = LLTokenizer(fast_tokenizer_source(json_file), eos_token=ends[0])
        except ValueError as error:
            raise UserError(
                f"structured_outputs cannot be used with {json_file}: {grammar_problem(str(error))}"
            ) from None
        tokenizer.check_unchanged()
        self.limits: LLParserLimits = LLParserLimits(**LIMITS)
        self._ends = sum(1 << end for end in set(ends))
        self._text = ((1 << vocab_size) - 1) & ~self._ends

    def next_mask(self, matcher: LLMatcher) -> bytes:
        """Mask of the tokens that may come next in the answer of ``matcher`` (see ``engine/guide.py``); empty if only an end token
        may follow.

        Raises:
            GuidanceError: a limit is exceeded, or the vocabulary cannot spell the required text.
        """
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & self._text
        if matcher.is_error():
            raise GuidanceError(grammar_problem(matcher.get_error()))
        may_end = matcher.is_accepting()
        if matcher.is_stopped() or not allowed:
            if not may_end:
                raise GuidanceError("the required text cannot be expressed in the tokens of this model")
            return b""
        if may_end:
            allowed |= self._ends
        return allowed.to_bytes(-(-allowed.bit_length() // 8), "little")


class Grammar:
    """A compiled grammar for answers with structured output.

    Args:
        source: the grammar, as ``grammar_source`` returns it.
        kind: the field of ``StructuredOutputs`` that the grammar comes from, for errors.

    Raises:
        UserError: ``source`` is not a valid grammar, is too large, or allows no answer.
    """

    def __init__(self, source: str, vocabulary: GuidanceVocabulary, kind: str):
        from llguidance import LLMatcher

        self.vocabulary = vocabulary
        self._matcher: LLMatcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=vocabulary.limits)
        try:
            self.mask = vocabulary.next_mask(self._matcher)
        except GuidanceError as error:
            raise UserError(f"structured_outputs.{kind} is refused: {error}") from None
        if not self.mask:
            raise UserError(f"structured_outputs.{kind} is refused: it allows only the empty output")
        self.has_failed = False
        """Whether an answer has exceeded a limit in ``LIMITS``. The answers of a grammar share the lexer's fuel and states, so the
        grammar is compiled again for the next answer."""

    def start(self) -> LLMatcher:
        """Make a matcher for a new answer, which follows the answer through the grammar."""
        return self._matcher.deep_copy()


class GrammarGuide:
    """Position of one answer in a grammar; an ``engine.guide.Guide``."""

    def __init__(self, grammar: Grammar):
        self._grammar, self._matcher = grammar, grammar.start()
        self._tokens: list[int] = []
        self._mask: bytes | None = grammar.mask  # None until it is computed
        self.error = ""

    @property
    def mask(self) -> bytes:
        if self._mask is None:
            self._mask = self._next_mask()
        return self._mask

    def accept(self, token: int) -> None:
        """Advance the position by ``token``, the next token of the answer."""
        self._tokens.append(token)
        self._matcher.consume_token(token)
        self._mask = self._next_mask()

    def rollback(self, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` tokens. The mask is computed again when it is needed."""
        del self._tokens[len(self._tokens) - num_tokens :]
        if self._matcher.is_error() or not self._matcher.rollback(num_tokens):  # a matcher in error cannot roll back
            self._matcher = self._grammar.start()
            self._matcher.consume_tokens(self._tokens)
        self._mask, self.error = None, ""

    def _next_mask(self) -> bytes:
        try:
            return self._grammar.vocabulary.next_mask(self._matcher)
        except GuidanceError as error:
            self.error, self._grammar.has_failed = str(error), True
            return b""


def grammar_problem(text: str) -> str:
    """First line of llguidance's error message, at most 200 characters. Messages in ``OWN_MESSAGES`` are replaced, as
    they name an option of llguidance that a client cannot set."""
    own = next((message for part, message in OWN_MESSAGES.items() if part in text), None)
    return own or f"{text.strip().partition(chr(10))[0]:.{MAX_PROBLEM}}"
