"""lark_grammar: converts llama.cpp's GBNF and the EBNF of xgrammar and vLLM (``root ::= …``) to Lark's notation.

The two languages hardly differ: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md and
https://xgrammar.mlc.ai/docs/tutorials/ebnf_guided_generation.html. The converter that llguidance ships takes quadratic time,
ignores the case of rule names, and reads ``.``, ``&&`` in character classes and ``\\u`` escapes in another way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache

from labinfer.base.errors import UserError

ROOT = "root"
FIRST_RULE = re.compile(r"(?:\s+|#[^\n]*(?:\n|$))*[A-Za-z0-9_-]+\s*::=")
"""Pattern with which a GBNF or EBNF grammar begins, and no Lark grammar."""
TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    | (?P<rule>[A-Za-z0-9_-]+)\s*::=
    | (?P<name>[A-Za-z0-9_-]+)
    | "(?P<text>(?:[^"\\\n]|\\.)*)"
    | \[(?P<set>\^?(?:[^\]\\\n]|\\.)*)\]
    | \{\s*(?P<least>\d{1,9})\s*(?P<to>,\s*(?P<most>\d{0,9})\s*)?\}
    | (?P<sign>[|()*+?.])""",
    re.VERBOSE | re.DOTALL,
)
CHARACTER = re.compile(
    r"\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\U(?P<U>[0-9a-fA-F]{8})|\\(?P<escaped>.)|(?P<plain>[^\\])",
    re.DOTALL,
)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {letter: letter for letter in "\\\"'[]^-/"}
ANY = "/(?s:.)/"


def lark_grammar(text: str) -> str:
    """Convert a grammar in GBNF or EBNF to Lark's notation; a Lark grammar is returned unchanged.

    Raises:
        UserError: the grammar is invalid GBNF or EBNF.
    """
    return _convert(text) if FIRST_RULE.match(text) else text


@lru_cache(16)
def _convert(text: str) -> str:
    defined: dict[str, str] = {}  # Lark's name of each rule
    used: dict[str, int] = {}  # position of the first use of each rule
    parts: list[str] = []
    is_empty, depth = True, 0  # whether the current alternative is empty; number of open parentheses
    for token, position in _tokens(text):
        kind, value = token.lastgroup, token.group()
        if kind == "rule":
            if parts and (is_empty or depth):
                parts.append(_rule_end(is_empty, depth, text, position))
            name = token["rule"]
            if name in defined:
                raise _error(f"the rule {name!r:.60} is defined twice", text, position)
            defined[name] = "start" if name == ROOT else f"rule_{len(defined)}"
            parts.append(f"\n<{name}>:")
            is_empty = True
            continue
        if kind == "name":
            used.setdefault(token["name"], position)
            value = f"<{token['name']}>"
        elif kind == "text":
            value = _literal("".join(_characters(token["text"], text, position)))
        elif kind == "set":
            value = _character_set(token["set"], text, position)
        elif value == ".":
            value = ANY
        elif value in ("|", ")") and is_empty:
            value = f'"" {value}'
        elif (kind in ("least", "to", "most") or value in ("*", "+", "?")) and is_empty:
            raise _error(f"{value!r:.20} follows nothing that it could repeat", text, position)
        depth += (value == "(") - value.endswith(")") * (kind == "sign")
        if depth < 0:
            raise _error("unmatched closing parenthesis", text, position)
        is_empty = kind == "sign" and (value == "(" or value.endswith("|"))
        parts.append(value)
    parts.append(_rule_end(is_empty, depth, text, len(text)))
    if ROOT not in defined:
        raise UserError(f"structured_outputs.grammar has no rule {ROOT!r}, the start rule of GBNF and EBNF")
    for name, position in used.items():
        if name not in defined:
            raise _error(f"undefined rule {name!r:.60}", text, position)
    return "".join(
        f"\n{defined[part[2:-2]]}:" if part.startswith("\n<") else f" {defined[part[1:-1]] if part[0] == '<' else part}"
        for part in filter(None, parts)
    ).strip()


def _tokens(text: str) -> Iterator[tuple[re.Match, int]]:
    """Yield the lexical tokens of the grammar ``text``, each with its position. White space and comments are skipped."""
    position = 0
    while position < len(text):
        token = TOKEN.match(text, position)
        if token is None:
            raise _error(f"{text[position : position + 20]!r} cannot be parsed", text, position)
        if token.lastgroup != "space":
            yield token, position
        position = token.end()


def _rule_end(is_empty: bool, depth: int, text: str, position: int) -> str:
    """End of a rule in Lark's notation: an empty string literal if the rule's last alternative is empty (``is_empty``). Refuses a
    rule with unclosed parentheses."""
    if depth:
        raise _error("unclosed parenthesis", text, position)
    return '""' if is_empty else ""


def _literal(characters: str) -> str:
    """Literal in Lark's notation, as a sequence of single characters. If a longer and a shorter literal both match, llguidance's
    lexer would accept only the longer one."""
    spelled = " ".join(json.dumps(character).replace("\x7f", "\\u007f") for character in characters)
    return f"({spelled})" if len(characters) > 1 else spelled or '""'


def _characters(written: str, text: str, position: int) -> Iterator[str]:
    """Yield the characters of ``written``, a literal or a character set, with escapes resolved."""
    for match in CHARACTER.finditer(written):
        if digits := match["x"] or match["u"] or match["U"]:
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise _error(f"{match[0]} is not a character", text, position)
            yield chr(code)
        elif match["plain"] is not None:
            yield match["plain"]
        elif match["escaped"] in ESCAPES:
            yield ESCAPES[match["escaped"]]
        else:
            raise _error(f"unknown escape {match[0]!r}", text, position)


def _character_set(written: str, text: str, position: int) -> str:
    """Convert a character set such as ``[a-z\\n]`` to a regular expression in which every character is written as its
    code point."""
    is_negated = written.startswith("^")
    raw = [match[0] for match in CHARACTER.finditer(written[is_negated:])]
    read = list(_characters(written[is_negated:], text, position))
    ranges, index = [], 0
    while index < len(read):
        first = last = read[index]
        if index + 2 < len(read) and raw[index + 1] == "-":
            last, index = read[index + 2], index + 2
        if last < first:
            raise _error(f"the range {first}-{last} is empty", text, position)
        ranges.append(f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}")
        index += 1
    if not ranges:
        if is_negated:
            return ANY
        raise _error("a character set is empty", text, position)
    return f"/[{'^' * is_negated}{''.join(ranges)}]/"


def _error(problem: str, text: str, position: int) -> UserError:
    line = text.count("\n", 0, position) + 1
    return UserError(f"structured_outputs.grammar, line {line}: {problem}; see docs/api.md")
