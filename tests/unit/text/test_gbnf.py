"""Grammars in GBNF and EBNF: what is taken by the converted grammar is what the dialects' documents say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

import labinfer
from labinfer.base.errors import UserError
from labinfer.base.structured_outputs import MAX_GRAMMAR_LENGTH, StructuredOutputs
from labinfer.text.gbnf import lark_grammar
from labinfer.text.guidance import grammar_source
from labinfer.text.tokenizer import Tokenizer

DEMO = Path(labinfer.__file__).parent / "assets" / "demo"
JSON = r"""
# llama.cpp's grammars/json.gbnf
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
SQL = """root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
CASES = {
    "json.gbnf": (
        JSON,
        ['{"a": [1, -2.5e3, "\\u00e9\\n", null], "b": {}}', "{}"],
        ['{"a": 1', "[1]", '{"a" 1}', "{a: 1}"],
    ),
    "vllm's sql": (SQL, ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT col_3 ", "SELECT"]),
    "dashed names": ('root ::= item-list\nitem-list ::= "- " [^\\n]+ "\\n"', ["- a b\n"], ["- \n", "-a\n"]),
    "case of names": ('root ::= Ab aB\nAb ::= "x"\naB ::= "y"', ["xy"], ["xx", "yx"]),
    "counts": ('root ::= "a"{2} "b"{1,2} "c"{0,} "d"{ 1 , }', ["aabd", "aabbcccdd"], ["abd", "aabbbd", "aab"]),
    "repetition": ('root ::= "a"* "b"+ "c"?', ["b", "aabbc"], ["a", "bcc"]),
    "ranges": ("root ::= [a-cX-Z0-9_-]+", ["aX9_-", "b"], ["d", "W", ""]),
    "negated": (r'root ::= [^a-z\n"]+', ["A 1"], ["a", "\n", '"']),
    "operators of other classes": ("root ::= [a&&b~|]+", ["a&b~|"], ["c"]),
    "escapes": (
        r'root ::= "\x41\u00e9\U0001F600\"\\\n\t" [\x42-\x43\u4e00-\u9fff\]]',
        ['Aé😀"\\\n\tC', 'Aé😀"\\\n\t你'],
        ["A"],
    ),
    "any character": ('root ::= . . "b"', ["a\nb", "你😀b"], ["ab", "abc"]),
    "ambiguous": ('root ::= [a-z]* "end"', ["end", "abendcend"], ["en", "endx"]),
    "recursion": ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["((x)", "()"]),
    "alternatives on several lines": ('root ::=\n  "a" |\n  "b"\n  | "c"', ["a", "b", "c"], ["ab"]),
    "comments": ('# "root ::= 1"\nroot ::= "#" # no\n "a"', ["#a"], ["#"]),
    "a rule start": ('root ::= start\nstart ::= "s"', ["s"], ["t"]),
    "control characters": (r'root ::= "\x7f\x01" [\x7f]', ["\x7f\x01\x7f"], ["\x7f"]),
    "empty": ('root ::= "a" ("b" | ) | ""', ["ab", "a"], ["b"]),
}


@pytest.fixture(scope="module")
def matches():
    tokenizer, library = Tokenizer(DEMO), LLTokenizer(str(DEMO / "tokenizer.json"))

    def match(grammar: str, text: str) -> bool:
        matcher = LLMatcher(library, grammar_source(StructuredOutputs(grammar=grammar)), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return (
            all(map(matcher.consume_token, tokenizer.encode(text, add_special_tokens=False))) and matcher.is_accepting()
        )

    return match


@pytest.mark.parametrize("name", CASES)
def test_grammar_takes_what_its_dialect_says(matches, name):
    grammar, good, bad = CASES[name]
    assert [text for text in good if not matches(grammar, text)] == []
    assert [text for text in bad if matches(grammar, text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "x ::= y"',
        'start: A\nA: "root ::="',
        '%llguidance {}\nstart: "a"',
        '// root ::= "a"\nstart: "a"',
        "?start: a\na: /::=/",
    ],
)
def test_grammar_of_larks_stays_as_it_is(grammar):
    assert lark_grammar(grammar) is grammar


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('a ::= "x"', "has no rule 'root'"),
        ("root ::= a", "line 1: undefined rule 'a'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ('root ::= ("a"', "unclosed parenthesis"),
        ('root ::= "a")', "unmatched closing parenthesis"),
        ('root ::= ("a"\nb ::= "c")', "line 2: unclosed parenthesis"),
        ('root ::= "a', "cannot be parsed"),
        ("root ::= [a", "cannot be parsed"),
        ("root ::= [z-a]", "the range z-a is empty"),
        ("root ::= []", "a character set is empty"),
        (r'root ::= "\q"', "unknown escape"),
        (r'root ::= "\uD800"', "is not a character"),
        ("root ::= * ", "follows nothing"),
        ('root ::= "a" (?= "b")', "follows nothing"),
        ("root ::= <think>", "cannot be parsed"),
        ("root ::= ![a]", "cannot be parsed"),
    ],
)
def test_what_is_broken_is_named_with_its_line(grammar, message):
    with pytest.raises(UserError, match=message) as caught:
        grammar_source(StructuredOutputs(grammar=grammar))
    assert str(caught.value).startswith("structured_outputs.grammar")


@pytest.mark.parametrize("part", ["(", "[a", "a ", '"" ', "\\", "\n", "| ", "x ::= y\n", "#"])
def test_longest_grammar_is_read_in_linear_time(part):
    text = "root ::= " + part * (MAX_GRAMMAR_LENGTH // len(part) - 10)
    begin = time.process_time()
    try:
        lark_grammar(text)
    except UserError:
        pass
    assert time.process_time() - begin < 2.0
