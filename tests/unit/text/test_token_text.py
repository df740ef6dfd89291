"""How single tokens read: their text, their names, their bytes; and the log-probabilities that are told by them."""

from __future__ import annotations

import msgspec
import pytest

from labinfer.base.plan import TokenLogprobs
from labinfer.requests.openai.chat import chat_logprobs
from labinfer.requests.openai.completions import Echo, text_logprobs
from labinfer.text.byte_rules import BYTE_LETTERS
from labinfer.text.token_text import TokenText, make_token_text
from labinfer.text.tokenizer import Tokenizer

PIECES = ["the fox", "你好", "🦊 ½ é", "x\n\ty", "\ufffd"]


def test_byte_alphabet_is_that_of_gpt2():
    assert sorted(BYTE_LETTERS.values()) == list(range(256))
    letters = {"Ġ": 32, "Ċ": 10, "A": 65, "é": 0xE9, "Ń": 0xAD, "ł": 0xA0}
    assert {letter: BYTE_LETTERS[letter] for letter in letters} == letters


@pytest.mark.parametrize("kind", ["bpe", "sp"])
@pytest.mark.parametrize("text", PIECES)
def test_bytes_of_tokens_join_to_the_text(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(bytes(tokenizer.token_text(token).bytes) for token in ids)
    assert joined.decode() == " " * (kind == "sp") + text


@pytest.mark.parametrize("kind", ["bpe", "sp"])
def test_half_a_character_has_its_real_bytes(kind, request):
    tokenizer = request.getfixturevalue(kind)
    spelled = map(tokenizer.token_text, range(tokenizer.vocab_size))
    halves = [one for one in spelled if one.token == "\ufffd" and one.bytes != tuple("\ufffd".encode())]
    assert len({one.bytes for one in halves}) == len(halves) > 64
    for one in halves:
        with pytest.raises(UnicodeDecodeError):
            bytes(one.bytes).decode()


@pytest.mark.parametrize(
    ("text", "name", "data", "expected"),
    [
        (" the", "Ġthe", b" the", TokenText(" the", 4, tuple(b" the"))),
        ("\ufffd\ufffd", "ä½", b"\xe4\xbd", TokenText("\ufffd\ufffd", 2, (0xE4, 0xBD))),
        ("\ufffd", "<0xE4>", b"\xe4", TokenText("\ufffd", 1, (0xE4,))),
        ("\ufffd", "abc", None, TokenText("\ufffd", 1, None)),
        ("\ufffd", None, None, TokenText("\ufffd", 1, None)),
        ("A", "<0x41>", b"A", TokenText("A", 1, (65,))),
        (" the", "the</w>", None, TokenText(" the", 4, tuple(b" the"))),
        ("", "<|im_end|>", b"<|im_end|>", TokenText("<|im_end|>", 0, tuple(b"<|im_end|>"))),
        (" ", "▁", b" ", TokenText(" ", 1, (32,))),
        ("", "<｜begin▁of｜>", None, TokenText("<｜begin▁of｜>", 0, tuple("<｜begin▁of｜>".encode()))),
        ("", None, b"", TokenText("token_id:7", 0, None)),
    ],
)
def test_token_reads_as_it_decodes_or_by_its_name(text, name, data, expected):
    assert make_token_text(7, text, name, data) == expected


def test_special_tokens_go_by_their_names(bpe, sp):
    assert bpe.token_text(1) == TokenText("<|im_end|>", 0, tuple(b"<|im_end|>"))
    assert sp.token_text(2).token == "</s>"
    for tokenizer in (bpe, sp):
        assert tokenizer.token_text(tokenizer.vocab_size + 9) == TokenText(
            f"token_id:{tokenizer.vocab_size + 9}", 0, None
        )


def test_spelling_is_remembered(bpe_directory):
    tokenizer = Tokenizer(bpe_directory)
    first = tokenizer.token_text(5)
    assert tokenizer.token_text(5) is first


# Log-probabilities.


def measured(token_id, logprob, **top):
    return TokenLogprobs(token_id, logprob, {int(key[1:]): value for key, value in top.items()})


def test_chosen_token_is_always_among_the_top_ones(bpe):
    a, b, c = (bpe.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    told = text_logprobs([c], [TokenLogprobs(c, -3.0, {a: -0.5, b: -1.0})], bpe)
    assert told.top_logprobs == [{"a": -0.5, "b": -1.0, "c": -3.0}]
    told = text_logprobs([a], [TokenLogprobs(a, -0.5, {a: -0.5, b: -1.0})], bpe)
    assert told.top_logprobs == [{"a": -0.5, "b": -1.0}]


def test_of_tokens_that_read_alike_the_likelier_is_told(bpe):
    halves = [token for token in range(bpe.vocab_size) if bpe.decode([token]) == "\ufffd"][:3]
    likely, less, chosen = halves
    told = text_logprobs([chosen], [TokenLogprobs(chosen, -3.0, {likely: -0.5, less: -1.0})], bpe)
    assert told.top_logprobs == [{"\ufffd": -0.5}]
    (content,) = chat_logprobs([TokenLogprobs(chosen, -3.0, {likely: -0.5, less: -1.0})], bpe).content
    assert len({tuple(one.bytes) for one in [content, *content.top_logprobs]}) == 3


def test_names_of_special_tokens_take_no_place_in_the_text(bpe):
    ids = bpe.encode("a<|im_end|>b", add_special_tokens=False)
    told = text_logprobs(ids, [measured(token, -1.0) for token in ids], bpe)
    assert (told.tokens, told.text_offset) == (["a", "<|im_end|>", "b"], [0, 1, 1])
    told = text_logprobs([], [], bpe, Echo("a<|im_end|>b", ids, []))
    assert told.text_offset == [0, 1, 11], "it is written in the prompt"


def test_echo_comes_before(bpe):
    a, b = (bpe.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    told = text_logprobs([b], [measured(b, -1.0)], bpe, Echo("aa", [a, a], [measured(a, -2.0)]))
    assert told.text_offset == [0, 1, 2]
    assert told.top_logprobs == [None, {"a": -2.0}, {"b": -1.0}]


def test_without_a_tokenizer_ids_stand_for_tokens():
    (content,) = chat_logprobs([measured(7, -1.0)], None).content
    assert msgspec.to_builtins(content) == {"token": "token_id:7", "logprob": -1.0, "bytes": None, "top_logprobs": []}
