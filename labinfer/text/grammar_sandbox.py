"""GrammarSandbox: compiles grammars in a helper process first, so that a grammar that never finishes compiling blocks no request.

The limits of llguidance do not bound all costs (``docs/decisions/0018``). A grammar that compiles in the helper process is compiled
again on rank 0, which takes as long.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from labinfer.base.errors import UserError
from labinfer.base.structured_outputs import StructuredOutputs
from labinfer.text.gguf_tokenizer import fast_tokenizer_source
from labinfer.text.guidance import LIMITS, grammar_problem, grammar_source, need_json_file
from labinfer.text.helper_process import (
    HelperEnded,
    HelperProcess,
    HelperRefused,
    HelperTimeout,
    answer_messages,
)
from labinfer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

MODULE = "labinfer.text.grammar_sandbox"
CHECK_SECONDS = 1.0
"""Timeout, in seconds, of checking one grammar. A grammar that exceeds it is refused, and the helper process is killed."""
COMPILE_SECONDS = 0.4
"""Maximum CPU time, in seconds, of compiling a grammar. Rank 0 is blocked for that time when it compiles the grammar again."""
STEP_SECONDS = 0.1
"""Maximum CPU time, in seconds, of computing one token mask."""
WALK_SECONDS, WALK_TOKENS = 0.2, 32
"""CPU time in seconds, and number of tokens, for which a check generates random tokens that the grammar allows."""
MAX_BYTES = 1 << 30
"""Maximum address space of the helper process, in bytes."""
STACK_BYTES = 4 << 20
"""Stack size of the helper process in bytes, half of rank 0's. llguidance follows rules and references by recursion without a
limit, so a grammar that passes here also fits there."""
MAX_REMEMBERED = 256
"""Maximum number of grammars for which the result of the check is cached."""


class GrammarSandbox:
    """Checks grammars in a helper process; thread-safe.

    The helper process is started for the first grammar, and again after it was killed.

    Args:
        need_tokenizer: returns the checkpoint's tokenizer, or raises the ``UserError`` that says why there is none.
    """

    def __init__(self, need_tokenizer: Callable[[], Tokenizer]):
        self._need_tokenizer = need_tokenizer
        self._helper: HelperProcess | None = None
        self._trying = threading.Lock()
        self._lock = threading.Lock()  # protects ``_verdicts``; held briefly
        self._verdicts: dict[str, str] = {}  # reason to refuse each grammar, empty if valid; most recently used last

    def check(self, form: StructuredOutputs, before: str = "", field: str = "structured_outputs") -> None:
        """Refuse a structured-output constraint whose grammar is invalid, or takes too much time or memory.

        Args:
            before: grammar rules for text that may precede the constrained output.
            field: field of the request that has the constraint, for errors.

        Raises:
            UserError: the constraint is refused.
        """
        for source in self._sources(form, before):
            verdict = self._known(source)
            if verdict is None:
                with self._trying:
                    verdict = self._known(source)  # another thread may have checked it meanwhile
                    if verdict is None:
                        verdict = self._try(source)
                        self._remember(source, verdict)
            if verdict:
                name = f"{field}.{form.kind}" if field == "structured_outputs" else f"{field}: the schema"
                raise UserError(f"{name} is refused: {verdict}")

    def is_known(self, form: StructuredOutputs, before: str = "") -> bool:
        """Whether ``check`` would return at once, because the result for its grammar is cached.

        Raises:
            UserError: there is no tokenizer for grammars.
        """
        return all(self._known(source) is not None for source in self._sources(form, before))

    def close(self) -> None:
        """End the helper process, if it is running."""
        if self._helper is not None:
            self._helper.close()

    def _sources(self, form: StructuredOutputs, before: str) -> list[str]:
        need_json_file(self._need_tokenizer())
        sources = [grammar_source(form)]
        if before:  # also without ``before``, behind which random tokens might not reach the form
            sources.append(grammar_source(form, before))
        return sources

    def _known(self, source: str) -> str | None:
        with self._lock:
            verdict = self._verdicts.pop(source, None)
            if verdict is not None:
                self._verdicts[source] = verdict
            return verdict

    def _remember(self, source: str, verdict: str) -> None:
        with self._lock:
            self._verdicts[source] = verdict
            if len(self._verdicts) > MAX_REMEMBERED:
                del self._verdicts[next(iter(self._verdicts))]

    def _try(self, source: str) -> str:
        """Check a grammar in the helper process. Returns the reason to refuse it; empty if there is none.

        Raises:
            UserError: grammars do not work with this tokenizer.
        """
        self._need_tokenizer().check_unchanged()  # a new process reads the tokenizer's files again
        if self._helper is None:
            json_file = str(need_json_file(self._need_tokenizer()).resolve())
            self._helper = HelperProcess(MODULE, json_file, CHECK_SECONDS)
        try:
            return self._helper.ask(source.encode()).decode()
        except HelperTimeout:
            return f"compiling it takes more than {CHECK_SECONDS:g} s; simplify it"
        except HelperEnded as error:
            return f"it does not compile: {error}; simplify it"
        except HelperRefused as error:
            raise UserError(f"structured_outputs cannot be used with {self._helper.argument}: {error}") from None


# Code that runs in the helper process:


def main(json_file: str) -> None:
    """Run the helper process. Each message is a grammar, answered with the reason to refuse it; empty if there is none."""
    from llguidance import LLParserLimits, LLTokenizer

    try:
        tokenizer, problem = LLTokenizer(fast_tokenizer_source(Path(json_file))), ""
    except ValueError as error:
        tokenizer, problem = None, grammar_problem(str(error))
    limits = LLParserLimits(**LIMITS)
    answer_messages(
        lambda source: try_grammar(tokenizer, source.decode(), limits).encode(),
        problem=problem,
        seconds=CHECK_SECONDS,
        most_bytes=MAX_BYTES,
        stack_bytes=STACK_BYTES,
    )


def try_grammar(tokenizer: LLTokenizer, source: str, limits: LLParserLimits) -> str:
    """Compile a grammar, and generate some random tokens that it allows. Returns the reason to refuse it; empty if there is
    none."""
    from llguidance import LLMatcher

    begin = time.process_time()
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    mask = matcher.compute_bitmask()
    compiled = time.process_time()
    if matcher.is_error():
        return grammar_problem(matcher.get_error())
    if compiled - begin > COMPILE_SECONDS:
        return f"compiling it takes {compiled - begin:.1f} s (limit: {COMPILE_SECONDS:g} s); simplify it"
    draw, before = random.Random(0), compiled
    for number in range(WALK_TOKENS):
        token = _any_token(mask, draw, tokenizer.eos_token)
        if token is None or before - compiled > WALK_SECONDS:
            break
        matcher.consume_token(token)
        if matcher.is_stopped() and not matcher.is_error():
            break
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return f"after {number + 1} tokens: {grammar_problem(matcher.get_error())}"
        now = time.process_time()
        if now - before > STEP_SECONDS:
            return f"computing the next token mask takes {now - before:.1f} s; simplify it"
        before = now
    return ""


def _any_token(mask: bytes, draw: random.Random, eos: int) -> int | None:
    """Draw a random token that ``mask`` allows, other than ``eos``; None if there is none."""
    allowed = int.from_bytes(mask, "little") & ~(1 << eos)
    if not allowed:
        return None
    skipped = draw.randrange(allowed.bit_length())
    rest = allowed >> skipped
    return skipped + (rest & -rest).bit_length() - 1


if __name__ == "__main__":
    main(sys.argv[1])
