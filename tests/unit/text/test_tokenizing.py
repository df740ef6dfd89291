"""Long texts: refused before they are tokenized where they cannot fit, and tokenized in a process that can be ended."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tokenizers import Regex, models, normalizers, processors
from tokenizers import Tokenizer as FastTokenizer

import labinfer
from labinfer.base.errors import PromptTooLong, UserError
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.tokenizing import PromptText, TokenizingProcess

DEMO = Path(labinfer.__file__).parent / "assets" / "demo"
TEXT = "The sea and the wind, and 12 gulls over the water.\n" * 40
MESSAGES = [
    {"role": "user", "content": "What is 2 + 3?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 10**30, "b": "\ud800"}}}],
    },
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(DEMO)


@pytest.fixture
def process():
    process = TokenizingProcess(DEMO, "", 1000)
    yield process
    process.close()


def count_library_calls(tokenizer: Tokenizer, monkeypatch) -> list[int]:
    """The lengths of the texts that the library is given from now on."""
    lengths, encode = [], tokenizer._backend.encode

    def counted(text: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer._backend, "encode", counted)
    return lengths


def test_text_with_more_characters_than_the_context_can_have_never_reaches_the_library(demo, monkeypatch):
    text = "x" * (100 * demo.longest_token + 1)
    lengths = count_library_calls(demo, monkeypatch)
    with pytest.raises(
        PromptTooLong, match=r"^This model's maximum context length is 100 tokens\. However, .*: the prompt is too long"
    ):
        demo.encode_within(text, 100)
    assert lengths == []


@pytest.mark.parametrize("normalizer", [None, normalizers.Replace(Regex(" +"), "a")])
def test_characters_that_the_tokenizer_joins_or_drops_are_no_bound(tmp_path, normalizer):
    library = FastTokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=normalizer is None))
    if normalizer is not None:
        library.normalizer = normalizer
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    text = (" " if normalizer else "é") * 1000
    assert len(tokenizer.encode_within(text, 10)) == 1
    with pytest.raises(PromptTooLong, match="are 80 tokens already"):
        tokenizer.encode_within("a" * 1000, 10)


def test_text_that_cannot_fit_is_read_only_so_far_as_to_know_it(demo, monkeypatch):
    lengths = count_library_calls(demo, monkeypatch)
    text = TEXT * 100
    with pytest.raises(PromptTooLong, match="maximum context length is 20000 tokens.* are [0-9]+ tokens already"):
        demo.encode_within(text, 20_000)
    assert sum(lengths) <= 3 * 8 * 20_000 and len(text) > sum(lengths)


@pytest.mark.parametrize("max_tokens", [10, 100, 1000, 10**9])
@pytest.mark.parametrize("text", [TEXT[:20], TEXT, "a" * 79, " " * 3000 + "a", "é中\U0001f600" * 9])
def test_text_that_fits_has_the_tokens_that_it_has_without_a_limit(demo, text, max_tokens):
    expected = demo.encode(text)
    if len(expected) <= max_tokens:
        assert demo.encode_within(text, max_tokens) == expected


@pytest.mark.parametrize("template", ["$A {0}", "{0} $A {0}"])
@pytest.mark.parametrize("text", [TEXT, "a" * 500, "  x  ", "é中\U0001f600" * 90])
def test_text_is_cut_and_special_tokens_around_it_are_kept(tmp_path, template, text):
    """As the library's own truncation does; models such as Qwen3-Embedding read the last special token."""
    library = FastTokenizer.from_file(str(DEMO / "tokenizer.json"))
    name, number = next((token.content, number) for number, token in library.get_added_tokens_decoder().items())
    library.post_processor = processors.TemplateProcessing(
        single=template.format(name), special_tokens=[(name, number)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for limit in (3, 4, 17, 200, 5000):
        library.enable_truncation(limit)
        found = tokenizer.encode_first(text, limit)
        assert found == library.encode(text).ids and found[-1] == number
    count = template.count("{0}")
    with pytest.raises(UserError, match=f"{count} leaves no room for text: the tokenizer adds {count} special tokens"):
        tokenizer.encode_first(text, count)


def test_process_gives_the_same_tokens(demo, process):
    prompts = [
        PromptText(text=TEXT),
        PromptText(text=TEXT, add_special_tokens=False),
        PromptText(messages=MESSAGES[:1]),
        PromptText(text="é中\U0001f600"),
    ]
    assert process.encode(prompts) == [prompt.encode(demo, 1000) for prompt in prompts]


def test_numbers_and_halves_of_characters_that_json_may_hold_reach_the_template(process):
    with pytest.raises(UserError, match="template|Unicode"):  # the demo's has no place for calls
        process.encode([PromptText(messages=MESSAGES)])


def test_process_refuses_what_cannot_fit_and_goes_on(demo, process):
    with pytest.raises(PromptTooLong, match="maximum context length is 1000 tokens"):
        process.encode([PromptText(text="x" * (1000 * demo.longest_token + 1))])
    assert process.encode([PromptText(text="a")]) == [demo.encode("a")]


def test_process_can_be_ended_in_the_middle_of_a_call_and_starts_again(demo):
    process = TokenizingProcess(DEMO, "", 10**8)
    errors: list[Exception] = []

    def run() -> None:
        try:
            process.encode([PromptText(text="".join(map(chr, range(0x4E00, 0x9FFF))) * 400)])
        except UserError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not process._helper.is_running:
        time.sleep(0.01)
    time.sleep(0.1)
    begin = time.monotonic()
    process.end()
    thread.join(10)
    assert errors and time.monotonic() - begin < 1
    assert process.encode([PromptText(text="a")]) == [demo.encode("a")]
    process.close()
    assert not process._helper.is_running


class PanicException(BaseException):
    """As pyo3's, which cannot be imported."""


@pytest.mark.parametrize("kind", [PanicException, Exception])
def test_library_that_fails_refuses_the_text_and_nothing_else(demo, monkeypatch, kind):
    class Failing:
        def encode_batch_fast(self, texts, add_special_tokens):
            raise kind("called `Result::unwrap()` on an `Err` value")

        def decode(self, token_ids, skip_special_tokens):
            raise kind("index out of bounds")

    tokenizer = Tokenizer(DEMO)
    monkeypatch.setattr(tokenizer._backend, "_tokenizer", Failing())
    monkeypatch.setattr(tokenizer._backend, "_rules", None)  # as with decoders that the library must run
    with pytest.raises(UserError, match=r"the tokenizer fails on this text of 10000000 characters, 'aaaa.*unwrap"):
        tokenizer.encode("a" * 10_000_000)
    with pytest.raises(UserError, match=r"the tokenizer fails on 2 tokens, \[5, 6\]: 'index out of bounds'"):
        tokenizer.decode([5, 6])
