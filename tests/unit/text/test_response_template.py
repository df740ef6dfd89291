"""Response templates: delimiters that know what may still come, templates that are refused, and how a format is chosen."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import time

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import content_parsers

from labinfer.base.config import ModelOptions
from labinfer.base.errors import UserError
from labinfer.text.content_parsers import parse_content, tag_marks
from labinfer.text.cut_values import read_cut_value
from labinfer.text.delimiters import MATCH_SECONDS, MAX_MATCH, LiteralDelimiter, PatternDelimiter
from labinfer.text.reply_format import NONE, built_in_names, choose_format, describe_choice, load_built_in
from labinfer.text.reply_parser import ReplyParser
from labinfer.text.reply_parts import join_events
from labinfer.text.response_template import ResponseTemplate

# Delimiters.

PATTERNS = [
    "abc",
    "a|bb|ba",
    "(?:ab)?c",
    r"a\s{0,2}b",
    "a[bc]{1,3}",
    "a[bc]+?a",
    r"(?:\A|a)b",
    "a(?=bc)",
    "b|(?=ab)",
    "a.c",
    r"(?P<x>b*)a(?P<y>c?)",
    r"a\.",
    "a$",
    r"ab\Z",
    "a(?!bc)",
    "(?!ab)[ab]c",
    "(?=ab)a.",
    "(?:a(?=b)|c)b",
    r"([ab])\1c?",
]


@settings(max_examples=300)
@given(st.sampled_from(PATTERNS), st.text("abc. ", max_size=12))
def test_pattern_holds_back_what_may_still_become_a_match(pattern, text):
    """Beside the ``regex`` package, which Transformers uses for that."""
    delimiter, theirs = PatternDelimiter(pattern), regex.compile(pattern, regex.DOTALL)
    found, expected = delimiter.find(text, 0, len(text)), theirs.search(text)
    assert (found and (found.begin, found.end, found.captures)) == (
        expected
        and (expected.start(), expected.end(), {k: v for k, v in expected.groupdict().items() if v is not None})
    )
    partial = theirs.search(text, partial=True)
    if partial is not None and partial.partial and "+?" not in pattern:  # there it tells of what can be no match
        assert delimiter.pending(text, 0, len(text)) <= partial.start()


@settings(max_examples=300)
@given(st.sampled_from(PATTERNS), st.text("abc. ", max_size=10), st.text("abc. ", max_size=6))
def test_text_that_is_not_held_back_never_becomes_a_match(pattern, text, more):
    delimiter = PatternDelimiter(pattern)
    free = delimiter.pending(text, 0, len(text))
    before, after = delimiter.find(text, 0, len(text)), delimiter.find(text + more, 0, len(text + more))
    if after and after.begin < free:
        assert before == after


@settings(max_examples=200)
@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abc", max_size=12))
def test_literals_hold_back_their_beginnings_only(literals, text):
    delimiter = LiteralDelimiter(literals)
    beginnings = [
        at for at in range(len(text)) if any(one.startswith(text[at:]) and one != text[at:] for one in literals)
    ]
    assert delimiter.pending(text, 0, len(text)) == min(beginnings, default=len(text))
    found = delimiter.find(text, 0, len(text))
    starts = [at for at in range(len(text)) if text.startswith(tuple(literals), at)]
    assert (found.begin if found else None) == min(starts, default=None)
    if found:
        assert found.end - found.begin == max(len(one) for one in literals if text.startswith(one, found.begin))


@pytest.mark.parametrize(
    "pattern",
    ["(a", "a)", "[z-a]", "(?<=a)b", "(?<!a)b", r"\\(?<=a)b", "(?i)a", "(?R)?a", "a" * 5000, "*", "(?P=x)", "a**"]
    + ["(" * 2000, r"\N{NO SUCH NAME}", "a{3,1}"],
)
def test_pattern_that_is_broken_or_looks_back_is_refused(pattern):
    with pytest.raises(ValueError, match="not a valid regular expression|not supported|4096 characters at most"):
        PatternDelimiter(pattern)


@pytest.mark.parametrize(
    "pattern",
    [".*x", r"\s*<\w+\s*>", r"<p=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</p>", r"a{2,900}b{2,900}c", r"\d+\.\d+"]
    + [r"\u4f60\x41+", "a{}b", "[a-]+]", "(?:ab)*c", r"\(?<=a", r"[\N{DIGIT ONE}]*", "(?>a)"],
)
def test_pattern_that_fits_in_few_ways_is_taken(pattern):
    PatternDelimiter(pattern)


HOSTILE_TEXTS = ("a" * 1024, "ab" * 512, "a" * 1000 + "y", "b" + "a" * 1022, " " * 1024, "\u4e01" * 1024)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "(a+)+b", "(a+)+$", "(?:a|aa)*b", "(?:a|aa)*$", "(a?a?){9}", "(?:a?){500}a{500}", "(?:abcdef){e<=5}$"]
    + [".*.*.*x", "a.*b.*c", r"\s*\s*x", r"\w*\d*_*!", ".*(?:a.*|b.*)c", "a?" * 20 + "x", "(?:ab)*(?:ab)*(?:ab)*c"]
    + ["(?:a?){0,1}(?:a{0,40})(?:[ab]{0,40})(?:a{0,40})x", r"[^b]*a*", "(?:.*a|.*b)+x", "(?:.*a|.*b)+[xz]$"]
    + [r"\u4e01*\u4e01*\u4e01*x", r"[\u4e01-\u4e03]*[\u4e02-\u4e05]*[\U00004e02]*[xz]$", "(a|(?1)b)"],
)
def test_search_for_any_pattern_ends_in_time(pattern):
    delimiter = PatternDelimiter(pattern)
    for text in HOSTILE_TEXTS:
        begin = time.process_time()
        delimiter.find(text, 0, len(text))
        delimiter.pending(text, 0, len(text))
        assert time.process_time() - begin < 4 * MATCH_SECONDS


def test_pattern_that_takes_too_long_is_given_up_with_a_warning(caplog):
    delimiter, text = PatternDelimiter("(a+)+$"), "a" * 1000 + "y"
    assert delimiter.find("baa", 0, 3).begin == 1
    with caplog.at_level(logging.WARNING):
        assert delimiter.find(text, 0, len(text)) is None
    assert "pattern '(a+)+$' takes too long and is no longer used" in caplog.text
    begin = time.process_time()
    for _ in range(100):
        assert delimiter.find(text, 0, len(text)) is None and delimiter.pending(text, 0, len(text)) == len(text)
    assert time.process_time() - begin < MATCH_SECONDS
    assert delimiter.find("baa", 0, 3) is None and caplog.text.count("no longer used") == 1


def test_reply_is_read_although_every_pattern_takes_too_long():
    fields = {
        "thinking": {"open_pattern": "(a+)+$", "close": "</t>"},
        "tool_calls": {"open_pattern": "(?:a|aa)+c(?!.)", "close_pattern": "(a+)+$", "content": "json"},
        "content": {},
    }
    parser = ReplyParser(ResponseTemplate.parse(TEMPLATE | {"fields": fields}), tools=[{"function": {"name": "f"}}])
    text, begin = "a" * 1000 + "y", time.process_time()
    events = [event for letter in text * 3 for event in parser.feed(letter)] + parser.finish()
    assert time.process_time() - begin < 3
    assert join_events(events).content == text * 3


def test_tag_whose_pattern_takes_too_long_has_no_value():
    text, begin = "<p=" + "a" * 30_000 + "by", time.process_time()
    arguments = {"tag_pattern": "<p=(?P<key>(a+)+)$(?P<value>)"}
    with pytest.raises(ValueError, match=r"takes more than 0.25 s"):
        parse_content(text, "xml-inline", arguments)
    assert (
        read_cut_value(text, "xml-inline", arguments | {"tag_pattern": "<p=(?P<key>(a+)+)$(?P<value>.*?)</p>"}).value
        == {}
    )
    assert time.process_time() - begin < 4 * MATCH_SECONDS


@settings(max_examples=20)
@given(
    st.lists(
        st.sampled_from(["a", "b", ".", "[ab]", r"\w", "(?:ab)", "(?:a|b)", "x"]).flatmap(
            lambda part: st.sampled_from(["", "*", "+?", "{0,30}", "?"]).map(lambda repeat: part + repeat)
        ),
        min_size=1,
        max_size=7,
    ).map("".join)
)
def test_pattern_that_is_taken_is_matched_in_bounded_time(pattern):
    delimiter = PatternDelimiter(pattern)
    begin = time.process_time()
    for text in ("a" * 1024, "ab" * 512, "a" * 1000 + "y", "b" + "a" * 1022):
        delimiter.find(text, 0, len(text))
        delimiter.pending(text, 0, len(text))
    assert time.process_time() - begin < 4


def test_longest_match_is_bounded():
    delimiter, text = PatternDelimiter("a.*b"), "a" + "x" * MAX_MATCH + "b"
    assert delimiter.find(text, 0, len(text)) is None
    assert delimiter.find(text[2:], 0, len(text) - 2) is None
    begin = time.process_time()
    PatternDelimiter(r"\s*a").find(" " * 4096, 0, 4096)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("pattern", "marks"),
    [
        (r"<p=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</p>", ("<p=", "</p>")),
        (r'<p name=\"?(?P<key>[^"]+)"?>(?P<value>.*?)</p>', ("<p name=", "</p>")),
        (r"\[(?P<key>[^|]+)\]", ("[", "]")),
        ("a|(?P<key>b)", ("", "")),
        (r"(?P<key>a)\x41b", ("", "b")),
        (r"(?P<key>a)\d", ("", "")),
        ("ab?(?P<key>c)d{2}", ("a", "")),
        ("(?P<key>a)[]b]c", ("", "c")),
    ],
)
def test_marks_of_tags_are_what_all_of_them_begin_and_end_with(pattern, marks):
    assert tag_marks(pattern) == marks


# Values, beside Transformers'.


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (" a b ", "text", {}),
        (" a b ", "text", {"strip": False}),
        (" 12 ", "int", {}),
        ("1.5", "float", {}),
        (" True\n", "bool", {}),
        ("no", "bool", {}),
        ('{"a": [1, 2.5, null]}', "json", {}),
        ("{a: 1,b_2: {c: true}}", "json", {"unquoted_keys": True}),
        ('{a:<|"|>x "y"<|"|>,b:[<|"|>z<|"|>]}', "json", {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}),
        ("not json ", "json", {"allow_non_json": True}),
        (
            "<p=a>1</p>, \n<p=b>x\ny</p><p=a>2</p>",
            "xml-inline",
            {"tag_pattern": "<p=(?P<key>[^>]+)>(?P<value>.*?)</p>"},
        ),
        (
            "<p=a>1</p><p=b>x</p><p=a>2</p><p=a>3</p>",
            "xml-inline",
            {
                "tag_pattern": "<p=(?P<key>[^>]+)>(?P<value>.*?)</p>",
                "merge_duplicates": True,
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
        ),
        ("a: 1\n b : x: y \n\nno pair", "kv-lines", {}),
        ("a=1;b=2", "kv-lines", {"line_sep": ";", "kv_sep": "=", "value_parser": {"name": "int"}}),
    ],
)
def test_values_are_those_of_transformers(text, content, arguments):
    assert parse_content(text, content, arguments) == content_parsers.parse_content(text, content, arguments)


@given(st.sampled_from(["text", "int", "float", "bool", "json", "kv-lines"]), st.text(max_size=30))
def test_every_text_has_a_value_or_none(content, text):
    try:
        parse_content(text, content, {})
    except ValueError:
        pass


# Templates.

FIELDS = {"reasoning_content": {"open": "<think>", "close": "</think>"}, "content": {}}
TEMPLATE = {"start_anchor": "A:", "fields": FIELDS}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([], "must be an object"),
        ({}, "needs start_anchor"),
        ({"start_anchor": "a"}, "needs fields"),
        ({"start_anchor": "a", "fields": []}, "fields"),
        ({"start_anchor": "", "fields": FIELDS}, "start_anchor"),
        ({"start_anchor": "a", "start_anchor_pattern": "b", "fields": FIELDS}, "not both"),
        ({"start_anchor_pattern": "(", "fields": FIELDS}, "start_anchor_pattern"),
        (TEMPLATE | {"version": 2}, "version 2"),
        (TEMPLATE | {"colour": 1}, "unknown key 'colour'"),
        ({"start_anchor": "a", "fields": {"a": {}, "b": {}}}, "a and b both have no open"),
        ({"start_anchor": "a", "fields": {"a": {"open": ["x", 5]}}}, "field 'a': open"),
        ({"start_anchor": "a", "fields": {"a": {"opens": "x"}}}, "unknown key 'opens'"),
        (
            {"start_anchor": "a", "fields": {"a": {"close_pattern": "(a+"}}},
            "close_pattern .*not a valid regular expression",
        ),
        ({"start_anchor": "a", "fields": {"a": {"content": "yaml"}}}, "'yaml' is unknown"),
        ({"start_anchor": "a", "fields": {"a": {"content_args": {"strip": 5}}}}, "strip=5"),
        ({"start_anchor": "a", "fields": {"a": {"content": "xml-inline"}}}, "needs groups"),
        ({"start_anchor": "a", "fields": {"a": {"join": "x"}}}, "join goes with repeats"),
        ({"start_anchor": "a", "fields": {"a": {"transform_each": True}}}, "goes with transform"),
        ({"start_anchor": "a", "fields": {"a": {"transform": ["is {content}"]}}}, "mixes a placeholder"),
    ],
)
def test_template_that_makes_no_sense_is_refused_by_its_part(source, says):
    with pytest.raises(ValueError, match=says):
        ResponseTemplate.parse(source)


def test_reply_begins_behind_the_last_start_anchor():
    template = ResponseTemplate.parse(TEMPLATE)
    assert template.after_start("U: hi A: ho U: A:<think>\n") == "<think>\n"
    assert template.after_start("U: hi") is None


# The choice of a format.


def mark_text(name: str) -> str:
    """A chat template that teaches a format."""
    source = json.loads((load_built_in.__globals__["BUILT_IN"] / f"{name}.json").read_text(encoding="utf-8"))
    return "{# chat #}" + " and ".join(source["marks"])


@pytest.mark.parametrize("name", built_in_names())
def test_built_in_format_is_chosen_by_its_marks(name):
    assert choose_format("", None, mark_text(name) + " <think></think>").name == name
    assert choose_format(name, TEMPLATE, "").name == name
    assert choose_format(NONE, TEMPLATE, mark_text(name)) is None


def test_help_names_every_built_in_format():
    (flag,) = [field for field in dataclasses.fields(ModelOptions) if field.name == "response_template"]
    assert f"one of {', '.join(built_in_names())} (default" in flag.metadata["help"]


def test_chat_template_without_marks_has_no_format():
    assert choose_format("", None, "{{ messages }}") is None
    assert "no built-in one matches its chat template; give one with --response-template NAME|FILE" in describe_choice(
        None, ""
    )
    assert "as content only (--response-template none)" in describe_choice(None, NONE)
    assert describe_choice(load_built_in("glm"), "").endswith("template glm")


def test_checkpoints_own_template_comes_first(caplog):
    chosen = choose_format("", TEMPLATE, mark_text("hermes"))
    assert chosen.source == TEMPLATE and chosen.call == load_built_in("hermes").call
    assert choose_format("", TEMPLATE, "").reasoning.close == "</think>"
    with caplog.at_level(logging.WARNING):
        broken = {"start_anchor": "a", "fields": {"a": {"open_pattern": "(?<!x)"}}}
        assert choose_format("", broken, mark_text("hermes")).name == "hermes"
    assert "response_template cannot be used: field 'a': open_pattern" in caplog.text


def test_format_may_be_a_file_of_the_user(tmp_path):
    path = tmp_path / "mine.json"
    for source in (TEMPLATE, {"response_template": TEMPLATE, "reasoning": {"open": "<think>", "close": "</think>"}}):
        path.write_text(json.dumps(source))
        chosen = choose_format(str(path), None, mark_text("kimi"))
        assert chosen.source == TEMPLATE and chosen.reasoning.open == "<think>"
    for text, says in (
        ("{", "cannot be used"),
        ('{"fields": {}}', "needs start_anchor"),
        ('{"marks": []}', "response_template"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=says):
            choose_format(str(path), None, "")
    with pytest.raises(
        UserError, match=r"--response-template hermit is neither a file nor a built-in template: .*hermes"
    ):
        choose_format("hermit", None, "")


def test_prompt_that_has_no_start_may_open_a_thought_all_the_same():
    parser = load_built_in("hermes").parser("Assistant: <think>\n", [], True)
    assert parser.is_reasoning
    rng = random.Random(1)
    assert not load_built_in("hermes").parser("".join(rng.choices("<think>/ ", k=50)), [], True).has_reasoned
