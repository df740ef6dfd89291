"""Guides over real tokenizers: what they allow, where answers may end, and what they refuse, in bounded time."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import labinfer
from labinfer.base.errors import UserError
from labinfer.base.structured_outputs import StructuredOutputs
from labinfer.text import guidance
from labinfer.text.guidance import GrammarGuideMaker
from labinfer.text.tokenizer import Tokenizer

EOS = 2
VOCAB = 3072


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return Tokenizer(Path(labinfer.__file__).parent / "assets" / "demo")


@pytest.fixture(scope="session")
def maker(demo) -> GrammarGuideMaker:
    return GrammarGuideMaker(lambda: demo, VOCAB, (EOS,))


def allowed(mask: bytes) -> set[int]:
    return {8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def walk(guide, draw: random.Random, limit: int = 400, eos: int = EOS) -> tuple[list[int], bool]:
    """Any tokens that are allowed, to an end or the limit. Returns them, and whether they came to the end."""
    tokens: list[int] = []
    while guide.mask and len(tokens) < limit:
        choices = allowed(guide.mask)
        if eos in choices and (len(choices) == 1 or draw.random() < 0.3):
            return tokens, True
        tokens.append(draw.choice(sorted(choices - {eos})))
        guide.accept(tokens[-1])
    assert not guide.error
    return tokens, not guide.mask


def follows(maker, tokenizer, form: dict, text: str) -> bool:
    """Whether an answer may be exactly this text, in its usual tokens."""
    guide = maker.make(StructuredOutputs(**form))
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed(guide.mask):
            return False
        guide.accept(token)
    assert not guide.error
    return not guide.mask or EOS in allowed(guide.mask)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"regex": r"[a-c]{2,3}x?"}, ["ab", "abc", "ccx"], ["a", "abcc", "x", "", "ab\n"]),
        ({"regex": r"\d{3}-\d{4}"}, ["555-0123"], ["555-012", "555-01234", " 555-0123"]),
        ({"regex": "你好|再见"}, ["你好", "再见"], ["你", "好"]),
        ({"choice": ["yes", "no"]}, ["yes", "no"], ["ye", "yesno", "maybe", ""]),
        ({"choice": ["a", "ab", "abc"]}, ["a", "ab", "abc"], ["b", "abcd"]),
        (
            {"choice": ['say "hi"', "back\\slash", "tab\there", "巴黎", "🦊", "\x7f"]},
            ['say "hi"', "🦊", "\x7f"],
            ["say"],
        ),
        ({"json": {"enum": ["red", 5, None]}}, ['"red"', "5", "null"], ["red", "6", '"5"']),
        ({"json": SCHEMA}, ['{"name": "Ann", "age": 5}', '{"name":"","age":150}'], ['{"name": "Ann"}', "{}", "[]"]),
        ({"json": json.dumps(SCHEMA)}, ['{"name": "Ann", "age": 5}'], ['{"name": "Ann", "age": 151}']),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}', ""]),
        ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["(x", "x)", "()"]),
    ],
)
def test_guide_allows_what_has_the_form_and_nothing_else(maker, demo, form, good, bad):
    for text in good:
        assert follows(maker, demo, form, text), text
    for text in bad:
        assert not follows(maker, demo, form, text), text


@pytest.mark.parametrize(
    "pattern", [r"[a-c]{2,40}", r"(ab|a)(c|bcd)*", r"-?[0-9]+(\.[0-9]{1,3})?", r"[^x]{5}", r"(?i:yes|no)!*"]
)
def test_whatever_is_drawn_has_the_form(maker, demo, pattern):
    """Over any allowed tokens; and the end is allowed exactly where the text so far has the form."""
    for seed in range(20):
        draw, guide, tokens = random.Random(seed), maker.make(StructuredOutputs(regex=pattern)), []
        while guide.mask and len(tokens) < 60:
            choices = allowed(guide.mask)
            text = demo.decode(tokens)
            if "\ufffd" not in text:
                assert (EOS in choices) == bool(re.fullmatch(pattern, text)), text
            tokens.append(draw.choice(sorted(choices - {EOS})))
            guide.accept(tokens[-1])
        assert not guide.error
        if not guide.mask:
            assert re.fullmatch(pattern, demo.decode(tokens))


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_drawn_is_json_of_the_schema(maker, demo, seed):
    schema = SCHEMA | {"properties": SCHEMA["properties"] | {"tags": {"type": "array", "items": {"enum": ["a", "b"]}}}}
    tokens, ended = walk(maker.make(StructuredOutputs(json=schema)), random.Random(seed))
    assert ended
    value = json.loads(demo.decode(tokens))
    assert set(value) <= {"name", "age", "tags"} and type(value["age"]) is int and 0 <= value["age"] <= 150
    assert isinstance(value["name"], str) and len(value["name"]) <= 8
    assert set(value.get("tags", [])) <= {"a", "b"}


def test_answer_that_can_only_end_is_at_its_end(maker, demo):
    guide = maker.make(StructuredOutputs(choice=["yes", "no"]))
    for token in demo.encode("yes", add_special_tokens=False):
        assert guide.mask
        guide.accept(token)
    assert (guide.mask, guide.error) == (b"", "")


def test_special_tokens_are_no_text(maker):
    assert allowed(maker.make(StructuredOutputs(regex="(.|\n)*")).mask) & {0, 1, EOS} == {EOS}


def test_same_tokens_give_the_same_masks_and_guides_do_not_know_each_other(maker):
    first, second = (maker.make(StructuredOutputs(json=SCHEMA)) for _ in range(2))
    begin = second.mask
    tokens, masks = [], []
    draw = random.Random(3)
    while first.mask:
        masks.append(first.mask)
        tokens.append(draw.choice(sorted(allowed(first.mask) - {EOS})))
        first.accept(tokens[-1])
    assert second.mask == begin
    for token, mask in zip(tokens, masks, strict=True):
        assert second.mask == mask
        second.accept(token)
    assert second.mask == b""


# Vocabularies.


@pytest.mark.parametrize("form", [{"regex": "(.|\n)*"}, {"grammar": "start: <[*]>*"}])
def test_ids_that_the_tokenizer_does_not_know_are_never_allowed(demo, form):
    guide = GrammarGuideMaker(lambda: demo, VOCAB + 999, (EOS,)).make(StructuredOutputs(**form))
    assert max(allowed(guide.mask)) < demo.vocab_size


@pytest.mark.parametrize("vocab_size", [999, 1000])
def test_ids_beyond_the_logits_are_never_allowed(demo, vocab_size):
    guide = GrammarGuideMaker(lambda: demo, vocab_size, (EOS,)).make(StructuredOutputs(regex="(.|\n)*"))
    assert vocab_size - 10 < max(allowed(guide.mask)) < vocab_size


@pytest.mark.parametrize(("ends", "expected"), [((0,), {0}), ((0, EOS, 1), {0, 1, EOS}), ((10**6, EOS), {EOS})])
def test_every_end_of_the_checkpoint_is_allowed_where_an_answer_may_end(demo, ends, expected):
    guide = GrammarGuideMaker(lambda: demo, VOCAB, ends).make(StructuredOutputs(regex="a*b?"))
    assert allowed(guide.mask) & {0, 1, EOS} == expected
    guide.accept(demo.encode("b")[0])
    assert guide.mask == b""
    guide = GrammarGuideMaker(lambda: demo, VOCAB, ends).make(StructuredOutputs(regex="a+"))
    assert not allowed(guide.mask) & {0, 1, EOS}


def test_end_that_is_a_token_of_text_is_an_end_only(demo):
    (end,) = demo.encode("a")
    maker = GrammarGuideMaker(lambda: demo, VOCAB, (EOS, end))
    assert end in allowed(maker.make(StructuredOutputs(regex="[ab]*")).mask)
    assert end not in allowed(maker.make(StructuredOutputs(regex="[ab]+")).mask)
    with pytest.raises(UserError, match="cannot be expressed in the tokens of this model"):
        maker.make(StructuredOutputs(regex="a"))


@pytest.mark.parametrize("ends", [(), (VOCAB + 1,)])
def test_checkpoint_without_an_end_is_refused(demo, ends):
    with pytest.raises(UserError, match="needs an end-of-sequence token"):
        GrammarGuideMaker(lambda: demo, VOCAB, ends).make(StructuredOutputs(regex="a"))


def test_another_tokenizer_with_gaps_in_the_logits(bpe):
    maker = GrammarGuideMaker(lambda: bpe, 512, (1,))
    tokens, ended = walk(maker.make(StructuredOutputs(json=SCHEMA)), random.Random(0), eos=1)
    assert ended and set(json.loads(bpe.decode(tokens))) == {"name", "age"}


def test_sentencepiece_alone_is_refused(sp):
    with pytest.raises(UserError, match="needs a tokenizer.json"):
        GrammarGuideMaker(lambda: sp, 512, (1,)).make(StructuredOutputs(regex="a"))


def test_tokenizer_that_llguidance_does_not_read_is_refused(tmp_path):
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import models

    FastTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    words = Tokenizer(tmp_path)
    with pytest.raises(UserError, match="structured_outputs cannot be used with"):
        GrammarGuideMaker(lambda: words, 2, (1,)).make(StructuredOutputs(regex="a"))


def test_checkpoint_without_tokenizer_says_so():
    def need_tokenizer():
        raise UserError("there is no tokenizer")

    with pytest.raises(UserError, match="there is no tokenizer"):
        GrammarGuideMaker(need_tokenizer, 512, (1,)).make(StructuredOutputs(regex="a"))


def test_nothing_is_imported_before_the_first_guide():
    code = "import sys, labinfer.text.guidance\nprint({'llguidance', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Refusals.


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "("}, "regex"),
        ({"regex": "a(?=b)"}, "regex"),
        ({"regex": r"(a)\1"}, "regex"),
        ({"grammar": "begin: /a/"}, "grammar"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"grammar": '{"grammars": []}'}, "grammar"),
        ({"grammar": 'start: ""'}, "only the empty output"),
        ({"json": {"type": "strong"}}, "json"),
        ({"json": {"type": "object", "properties": 5}}, "json"),
        ({"json": {"$ref": "https://example.com/schema.json"}}, "json"),
        ({"json": {"$ref": "#/$defs/missing"}}, "json"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, "json"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "json"),
        ({"json": {"x-guidance": {"nonsense": 1}}}, "json"),
    ],
)
def test_form_that_cannot_be_followed_is_refused_in_one_line(maker, form, says):
    with pytest.raises(UserError, match=f"structured_outputs.*{says}") as caught:
        maker.make(StructuredOutputs(**form))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_limit_that_is_hit_on_the_way_is_an_error_of_this_answer_only(demo, monkeypatch):
    monkeypatch.setitem(guidance.LIMITS, "max_lexer_states", 40)
    maker = GrammarGuideMaker(lambda: demo, VOCAB, (EOS,))
    wanted = StructuredOutputs(regex="[ab]*a[ab]{9}")
    guide, draw = maker.make(wanted), random.Random(0)
    for _ in range(200):
        if not guide.mask:
            break
        guide.accept(draw.choice(sorted(allowed(guide.mask) - {EOS})))
    assert guide.mask == b"" and guide.error and "\n" not in guide.error
    another = maker.make(wanted)
    assert another.mask and not another.error


# The cache.


def test_grammar_is_compiled_once_while_it_is_wanted(maker, monkeypatch):
    made = []
    compiled = guidance.Grammar.__init__

    def count(self, source, *others):
        made.append(source)
        compiled(self, source, *others)

    monkeypatch.setattr(guidance.Grammar, "__init__", count)
    for _ in range(3):
        maker.make(StructuredOutputs(regex="kept"))
        for number in range(guidance.MAX_CACHED - 1):
            maker.make(StructuredOutputs(regex=f"other{number}"))
    assert len(made) == guidance.MAX_CACHED
    maker.make(StructuredOutputs(regex="one more"))
    maker.make(StructuredOutputs(regex="kept"))  # the oldest had to go
    assert len(made) == guidance.MAX_CACHED + 2


# Going back.


@pytest.mark.parametrize("form", [{"regex": "([a-z]+ )*[0-9]{3}"}, {"json": {"type": "object"}}], ids=["regex", "json"])
@pytest.mark.parametrize("seed", range(5))
def test_rollback_leads_to_the_same_masks_as_going_there(maker, form, seed):
    draw, form = random.Random(seed), StructuredOutputs(**form)
    guide, masks, tokens = maker.make(form), [], []
    for _ in range(60):
        if guide.mask and (not tokens or draw.random() < 0.7):
            masks.append(guide.mask)
            tokens.append(draw.choice(sorted(allowed(guide.mask) - {EOS}) or [EOS]))
            guide.accept(tokens[-1])
        else:
            count = draw.randint(1, min(len(tokens), 5))
            guide.rollback(count)
            assert guide.mask == masks[-count] and not guide.error
            del tokens[-count:], masks[-count:]
    again = maker.make(form)
    for token in tokens:
        again.accept(token)
    assert again.mask == guide.mask


def test_rollback_leads_out_of_a_complete_answer(maker, demo):
    guide = maker.make(StructuredOutputs(choice=["yes"]))
    tokens = demo.encode("yes", add_special_tokens=False)
    begin = guide.mask
    for token in tokens:
        guide.accept(token)
    assert guide.mask == b"" and not guide.error
    guide.rollback(len(tokens))
    assert guide.mask == begin


def test_rollback_leads_out_of_an_error(maker):
    guide = maker.make(StructuredOutputs(regex="[a-z]{3,9}"))
    first = min(allowed(guide.mask))
    guide.accept(first)
    begin = guide.mask
    guide.accept(0)  # not allowed
    assert guide.error and guide.mask == b""
    guide.rollback(1)
    assert guide.mask == begin and not guide.error


def test_maker_gets_ready_beside_its_caller(demo, monkeypatch):
    go = threading.Event()

    def wait() -> Tokenizer:
        assert go.wait(10)
        return demo

    maker = GrammarGuideMaker(wait, VOCAB, (EOS,))
    assert not maker.get_ready() and not maker.get_ready()
    go.set()
    maker._preparing.join(10)
    assert maker.get_ready()
    assert maker.make(StructuredOutputs(regex="a+")).mask


def test_maker_that_cannot_get_ready_says_so_when_it_is_asked():
    def refuse() -> Tokenizer:
        raise UserError("there is no tokenizer")

    maker = GrammarGuideMaker(refuse, VOCAB, (EOS,))
    maker.get_ready()
    maker._preparing.join(10)
    assert maker.get_ready()
    with pytest.raises(UserError, match="there is no tokenizer"):
        maker.make(StructuredOutputs(regex="a+"))
