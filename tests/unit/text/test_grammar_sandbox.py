"""Grammars that cost too much are refused by a process that is there to be ended; whatever passes is cheap to follow."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import labinfer
from labinfer.base.errors import UserError
from labinfer.base.structured_outputs import StructuredOutputs
from labinfer.text.grammar_sandbox import CHECK_SECONDS, GrammarSandbox
from labinfer.text.guidance import GrammarGuideMaker
from labinfer.text.tokenizer import Tokenizer

EOS, VOCAB = 2, 3072


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(Path(labinfer.__file__).parent / "assets" / "demo")


@pytest.fixture
def sandbox(demo):
    sandbox = GrammarSandbox(lambda: demo)
    yield sandbox
    sandbox.close()


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def either(count: int) -> dict:
    return {"anyOf": [{"type": "object", "properties": {f"p{number}": {"type": "integer"}}} for number in range(count)]}


PATTERNS = {"json": {"allOf": [{"type": "string", "pattern": f"a{{{n},900}}.*b"} for n in range(1, 40)]}}
"""llguidance alone takes minutes and 20 GB for it."""
COSTLY = {
    "repeats of repeats": {"regex": "(a{1,1000}){1,1000}"},
    "repeats of repeats of repeats": {"regex": "((a{1,100}){1,100}){1,100}"},
    "a long repeat": {"regex": "(.|\n){1,100000}x"},
    "many states": {"regex": "(a|b)*a(a|b){60}"},
    "many states, all text": {"regex": "(.|\n)*a(.|\n){200}"},
    "unicode classes": {"regex": r"(\p{L}\p{N}\w\s){1,500}"},
    "alternatives": {"regex": "|".join(f"{number}x{number * 7919}" for number in range(4800))},
    "deep parentheses": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "optional chain": {"regex": "a?" * 5000 + "a" * 5000},
    "deep schema": {"json": nested(60)},
    "a large enumeration": {"json": {"enum": [f"{number * 7919}" for number in range(6000)]}},
    "many properties": {"json": {"type": "object", "properties": {f"property{n}": {} for n in range(2500)}}},
    "products of alternatives": {"json": {"allOf": [either(6) for _ in range(14)]}},
    "one of many": {"json": {"oneOf": either(400)["anyOf"]}},
    "long strings": {"json": {"type": "string", "minLength": 60_000, "maxLength": 60_001}},
    "many items": {"json": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 50_000, "maxItems": 60_000}},
    "items of items": {"json": {"type": "array", "maxItems": 999, "items": {"type": "array", "maxItems": 999}}},
    "references": {
        "json": {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(1500)} | {"a1500": {}},
        }
    },
    "patterns together": PATTERNS,
    "a divisor": {"json": {"type": "number", "multipleOf": 0.0000001234567}},
    "large choice": {"choice": [f"{number * 104729:060d}" for number in range(1024)]},
    "an ambiguous grammar": {"grammar": "start: a\na: a a a a | a a a | a a | /[a-z]/"},
    "a grammar of repeats": {"grammar": "start: a{1,1000}\na: b{1,1000}\nb: c{1,1000}\nc: /[a-z]{1,1000}/"},
    "empty rules": {"grammar": "start: a a a a a a a a\na: b b b b b b b b |\nb: c c c c c c c c |\nc: /x/ |"},
}


@pytest.mark.timing
@pytest.mark.parametrize("name", COSTLY)
def test_what_passes_is_compiled_and_followed_in_bounded_time(sandbox, demo, name):
    """On any machine a second is long for these; a limit that is hit on the way ends the answer."""
    sandbox.check(StructuredOutputs(regex="a"))  # it has started
    maker = GrammarGuideMaker(lambda: demo, VOCAB, (EOS,))
    maker.make(StructuredOutputs(regex="a"))
    wanted, begin = StructuredOutputs(**COSTLY[name]), time.monotonic()
    try:
        sandbox.check(wanted)
    except UserError as error:
        assert str(error).startswith("structured_outputs.") and len(str(error)) < 300
        assert time.monotonic() - begin < CHECK_SECONDS + 0.5
        return
    assert time.monotonic() - begin < CHECK_SECONDS + 0.5
    begin = time.monotonic()
    guide = maker.make(wanted)
    assert time.monotonic() - begin < 1.0
    draw = random.Random(1)
    for _ in range(100):
        if not guide.mask:
            break
        bits = int.from_bytes(guide.mask, "little") & ~(1 << EOS)
        tokens = [token for token in range(bits.bit_length()) if bits >> token & 1]
        begin = time.monotonic()
        guide.accept(draw.choice(tokens))
        assert time.monotonic() - begin < 0.5


def test_oneof_is_refused_in_words_of_the_request(sandbox):
    """llguidance's own message names an option that clients do not have."""
    schema = {"oneOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}]}
    with pytest.raises(
        UserError, match="the schema is refused: alternatives of a oneOf can match .* use anyOf"
    ) as caught:
        sandbox.check(StructuredOutputs(json=schema), field="response_format")
    assert "coerce_one_of" not in str(caught.value)


def test_grammar_without_end_is_refused_and_the_next_one_is_tried(sandbox):
    with pytest.raises(UserError, match="structured_outputs.json is refused: compiling it takes more than 1 s"):
        sandbox.check(StructuredOutputs(**PATTERNS))
    sandbox.check(StructuredOutputs(regex="[0-9]+"))


def test_verdict_is_remembered(sandbox):
    sandbox.check(StructuredOutputs(regex="[0-9]+"))
    for _ in range(2):
        with pytest.raises(UserError, match="takes more than"):
            sandbox.check(StructuredOutputs(**PATTERNS))
    assert not sandbox._helper.is_running  # the second time nothing was started
    sandbox.check(StructuredOutputs(regex="[0-9]+"))
    assert not sandbox._helper.is_running
    assert sandbox.is_known(StructuredOutputs(**PATTERNS)) and not sandbox.is_known(StructuredOutputs(regex="b"))


def test_known_grammar_does_not_wait_for_one_that_is_tried(sandbox):
    known = StructuredOutputs(regex="[0-9]+")
    sandbox.check(known)
    with ThreadPoolExecutor(1) as pool:
        trying = pool.submit(sandbox.check, StructuredOutputs(**PATTERNS))
        while not sandbox._trying.locked():
            time.sleep(0.001)
        sandbox.check(known)
        assert not trying.done()
        with pytest.raises(UserError, match="takes more than"):
            trying.result()


def test_process_that_dies_is_replaced(sandbox):
    sandbox.check(StructuredOutputs(regex="a"))
    sandbox._helper.end()
    sandbox._helper._process.wait()
    sandbox.check(StructuredOutputs(regex="b"))


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "("}, "regex is refused: .*invalid regex"),
        ({"grammar": "start: nothing"}, "grammar is refused: .*nothing"),
        ({"json": {"type": "strong"}}, "json is refused"),
    ],
)
def test_broken_grammar_is_refused_with_llguidances_reason(sandbox, form, says):
    with pytest.raises(UserError, match=f"structured_outputs.{says}") as caught:
        sandbox.check(StructuredOutputs(**form))
    assert "\n" not in str(caught.value)


def test_limit_that_any_answer_hits_soon_is_found(sandbox):
    properties = {f"property{number}": {"type": "null"} for number in range(1000)}
    with pytest.raises(UserError, match="after 1 tokens: .* items"):
        sandbox.check(StructuredOutputs(json={"type": "object", "properties": properties}))


def test_threads_may_share_it(sandbox):
    with ThreadPoolExecutor(8) as pool:
        forms = [StructuredOutputs(regex=f"[0-9]{{{number}}}") for number in range(1, 40)]
        assert list(pool.map(sandbox.check, forms)) == [None] * len(forms)


def test_tokenizer_that_llguidance_does_not_read_is_refused(tmp_path):
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import models

    FastTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    words = Tokenizer(tmp_path)
    with pytest.raises(UserError, match="structured_outputs cannot be used with .*tokenizer.json: "):
        GrammarSandbox(lambda: words).check(StructuredOutputs(regex="a"))


def test_it_ends_with_its_owner(demo):
    sandbox = GrammarSandbox(lambda: demo)
    sandbox.check(StructuredOutputs(regex="a"))
    process = sandbox._helper._process
    process.stdin.close()  # as the owner's death does
    assert process.wait(10) == 0
    process.stdout.close()


def rules(count: int) -> StructuredOutputs:
    chain = "".join(
        f"a{number}: {'(' if number % 9 else ''}a{number + 1}{')?' if number % 9 else ''}\n" for number in range(count)
    )
    return StructuredOutputs(grammar=f'start: a0 "x"\n{chain}a{count}: "y"\n')


def references(count: int) -> StructuredOutputs:
    chain = {f"{number}": {"anyOf": [{"$ref": f"#/$defs/{number + 1}"}]} for number in range(count)}
    return StructuredOutputs(json={"$ref": "#/$defs/0", "$defs": chain | {f"{count}": {"type": "string"}}})


@pytest.mark.parametrize("chain", [rules, references])
def test_chain_that_would_be_too_deep_for_rank_0_is_refused(sandbox, demo, chain):
    """llguidance overflows its stack with it, which ends the process. What just passes is far from that in rank 0."""
    passes, fails = 100, 1500
    with pytest.raises(
        UserError, match="killed by SIG(SEGV|ABRT|BUS), probably out of memory or stack|too much memory"
    ):
        sandbox.check(chain(fails))
    while fails - passes > 20:
        middle = (passes + fails) // 2
        try:
            sandbox.check(chain(middle))
            passes = middle
        except UserError:
            fails = middle
    guide = GrammarGuideMaker(lambda: demo, VOCAB, (EOS,)).make(chain(passes))
    assert guide.mask
