"""Text is a function of the bytes of the tokens: streamed, with stop strings and whole, for every kind of vocabulary."""

from __future__ import annotations

import json
import random
import string
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import GGUFWriter
from gguf_files import finish
from gguf_vocabularies import add_sentencepiece, add_tokenizer
from llama_tokenizer import llama_tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import AnswerUpdate, FinishReason, Request
from labinfer.requests.outputs import RequestState
from labinfer.text.byte_rules import BYTE_LETTERS, read_byte_rules
from labinfer.text.detokenizer import Detokenizer
from labinfer.text.token_decoder import ContextDecoder
from labinfer.text.token_offsets import TokenOffsets
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.utf8_decoder import Utf8Decoder

GEMMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
METASPACE = {
    "type": "Sequence",
    "decoders": [
        {"type": "ByteFallback"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    ],
}
KINDS = ["byte level", "strip", "no strip", "metaspace", "sentencepiece", "gguf bpe", "gguf sentencepiece"]
LETTERS = "aé½ß你好世界今天क्ษ한あ😀😁🦊👩‍👧\u0301 \n"


class Vocabulary:
    """Our tokenizer of one kind beside Transformers' of the same vocabulary."""

    def __init__(self, kind: str, ours: Tokenizer, theirs: PreTrainedTokenizerFast):
        self.kind, self.ours, self.theirs = kind, ours, theirs
        self.special = {token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special}
        self.size = len(theirs)
        self.names = theirs.convert_ids_to_tokens(range(self.size))
        self.has_letters = kind in ("byte level", "gguf bpe")

    @cached_property
    def of_byte(self) -> dict[int, int]:
        """Token id of each single byte."""
        if self.has_letters:
            return {byte: self.names.index(letter) for letter, byte in BYTE_LETTERS.items()}
        return {byte: self.names.index(f"<0x{byte:02X}>") for byte in range(256)}

    def token_bytes(self, token_id: int, is_first: bool = False) -> bytes:
        """From the name in the vocabulary, as the formats define it."""
        name = self.names[token_id]
        if token_id in self.special:
            return b""
        if self.has_letters:
            return bytes(BYTE_LETTERS[letter] for letter in name)
        if len(name) == 6 and name.startswith("<0x"):
            return bytes([int(name[3:5], 16)])
        return name.replace("▁", "" if is_first and self.kind == "metaspace" else " ").encode()

    def text(self, token_ids: list[int], inside: bool) -> str:
        """The text by definition."""
        shown = [token_id for token_id in token_ids if token_id not in self.special]
        text = decode(
            b"".join(self.token_bytes(token_id, index == 0 and not inside) for index, token_id in enumerate(shown))
        )
        strips = self.kind in ("strip", "sentencepiece", "gguf sentencepiece") and not inside
        return text.removeprefix(" ") if strips else text

    def is_valid(self, token_ids: list[int]) -> bool:
        try:
            b"".join(map(self.token_bytes, token_ids)).decode()
        except UnicodeDecodeError:
            return False
        return True

    def draw(self, rng: random.Random) -> list[int]:
        """A sequence of tokens; every second one has no partial characters."""
        token_ids, is_whole = [], rng.random() < 0.5
        for _ in range(rng.randint(1, 8)):
            spelled = [self.of_byte[byte] for byte in "".join(rng.choices(LETTERS, k=rng.randint(1, 3))).encode()]
            match rng.randrange(4) if not is_whole else rng.randrange(2):
                case 0:
                    token_ids += spelled
                case 1:
                    drawn = rng.choices(range(self.size), k=rng.randint(1, 3))
                    token_ids += [token for token in drawn if not is_whole or self.is_valid([token])]
                case 2:
                    token_ids += spelled[rng.randrange(3) : len(spelled) - rng.randrange(3)]
                case 3:
                    token_ids += [self.of_byte[rng.randrange(128, 256)] for _ in range(rng.randint(1, 3))]
        return token_ids


def decode(data: bytes) -> str:
    """The rule, one position after another: a well-formed character, or one U+FFFD for a byte with which none begins."""
    text, begin = "", 0
    while begin < len(data):
        for end in range(begin + 1, begin + 5):
            try:
                text += data[begin:end].decode()
            except UnicodeDecodeError:
                continue
            begin = end
            break
        else:
            text, begin = text + "\ufffd", begin + 1
    return text


@pytest.fixture(scope="module")
def llama_directory(sp_directory, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    llama_tokenizer(sp_directory).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=KINDS)
def vocabulary(request, bpe_directory, sp_directory, llama_directory, tmp_path_factory) -> Vocabulary:
    kind, directory = request.param, tmp_path_factory.mktemp("vocabulary")
    if kind in ("byte level", "gguf bpe"):
        theirs = PreTrainedTokenizerFast.from_pretrained(bpe_directory)
        if kind == "byte level":
            return Vocabulary(kind, Tokenizer(bpe_directory), theirs)
        writer = GGUFWriter(directory / "model.gguf", "llama")
        add_tokenizer(writer, bpe_directory, "qwen2")
        finish(writer)
        return Vocabulary(kind, Tokenizer(directory / "model.gguf"), theirs)
    if kind in ("sentencepiece", "gguf sentencepiece"):
        theirs = llama_tokenizer(sp_directory)
        if kind == "sentencepiece":
            return Vocabulary(kind, Tokenizer(sp_directory), theirs)
        writer = GGUFWriter(directory / "model.gguf", "llama")
        add_sentencepiece(writer, sp_directory / "tokenizer.model", {})
        finish(writer)
        return Vocabulary(kind, Tokenizer(directory / "model.gguf"), theirs)
    values = json.loads((llama_directory / "tokenizer.json").read_text())
    values["decoder"] = {"no strip": GEMMA, "metaspace": METASPACE}.get(kind, values["decoder"])
    (directory / "tokenizer.json").write_text(json.dumps(values))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Vocabulary(
        kind,
        Tokenizer(directory),
        PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **names),
    )


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    """The text that each token brings, and that of the end."""
    pieces = []
    for token_id in token_ids:
        stopped = detokenizer.add(token_id)
        pieces.append(detokenizer.take_new())
        if stopped:
            break
    detokenizer.finish()
    return [*pieces, detokenizer.take_new()]


def check(vocabulary: Vocabulary, token_ids: list[int], rng: random.Random) -> None:
    ours = vocabulary.ours
    text, inside = vocabulary.text(token_ids, inside=False), vocabulary.text(token_ids, inside=True)
    assert ours.decode(token_ids) == text
    assert ours.further_decoder().decode(token_ids) == inside
    assert "".join(stream(Detokenizer(ours.reply_decoder()), token_ids)) == text
    pieces = stream(Detokenizer(ours.further_decoder()), token_ids)
    assert "".join(pieces) == inside
    shown = [token_id for token_id in token_ids if token_id not in vocabulary.special]
    if vocabulary.is_valid(token_ids):
        theirs = vocabulary.theirs.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert text == theirs
        assert "\ufffd" not in "".join(pieces)
    # Log-probabilities: bytes, and where tokens begin.
    data = [bytes(ours.token_text(token_id).bytes) for token_id in shown]
    assert decode(b"".join(data)) == inside
    _, offsets = TokenOffsets(ours).read(shown)
    for token, begin in zip(data, offsets, strict=True):
        if "\ufffd" not in decode(token):
            assert inside.startswith(decode(token), begin)
    # A stop string that begins anywhere; what ends behind the last token was incomplete until then.
    certain = "".join(pieces[:-1])
    if certain:
        begin = rng.randrange(len(certain))
        stop = certain[begin : begin + rng.randint(1, 4)]
        detokenizer = Detokenizer(ours.further_decoder(), (stop,))
        assert "".join(stream(detokenizer, token_ids)) == inside[: inside.index(stop)]
        assert detokenizer.stopped_by == stop


def check_many(vocabulary: Vocabulary, count: int, seed: int) -> None:
    rng, num_valid = random.Random(seed), 0
    for _ in range(count):
        token_ids = vocabulary.draw(rng)
        num_valid += vocabulary.is_valid(token_ids)
        check(vocabulary, token_ids, rng)
    assert count / 3 < num_valid < count * 2 / 3


def test_text_of_random_tokens_is_a_function_of_their_bytes(vocabulary):
    check_many(vocabulary, 300, 1)


@pytest.mark.slow
def test_text_of_20000_random_sequences_is_a_function_of_their_bytes(vocabulary):
    check_many(vocabulary, 20_000, 2)


@pytest.mark.parametrize("text", ["你好", "😀😁", "a你好 b😀😁c", "é½你"])
def test_neighbouring_characters_in_bytes_come_whole_and_stop_everywhere(vocabulary, text):
    token_ids = [vocabulary.of_byte[byte] for byte in text.encode()]
    ends = [len(text[:index].encode()) for index in range(1, len(text) + 1)]
    pieces = stream(Detokenizer(vocabulary.ours.further_decoder()), token_ids)
    assert [index + 1 for index, piece in enumerate(pieces) if piece] == ends
    assert "".join(pieces) == vocabulary.ours.further_decoder().decode(token_ids) == text
    for begin in range(len(text)):
        for end in range(begin + 1, len(text) + 1):
            for include in (False, True):
                detokenizer = Detokenizer(vocabulary.ours.further_decoder(), (text[begin:end],), include)
                assert "".join(stream(detokenizer, token_ids)) == text[: end if include else begin]


@pytest.mark.parametrize("streams", [False, True])
def test_cut_in_a_character_leaves_those_before_it(vocabulary, streams):
    text = "你好😀世"
    token_ids = [vocabulary.of_byte[byte] for byte in text.encode()]
    for count in range(1, len(token_ids) + 1):
        request = Request(key=0, prompt_token_ids=[5], sampling=SamplingParams(max_tokens=count))
        state, pieces = RequestState(request, vocabulary.ours, streams), []
        for index, token_id in enumerate(token_ids[:count], 1):
            reason = FinishReason.LENGTH if index == count else None
            state.add(AnswerUpdate(index=0, token_ids=[token_id], finish_reason=reason))
            if streams:
                pieces.append(state.take_delta(0).text)
        whole = text.encode()[:count].decode(errors="ignore")
        expected = whole + "\ufffd" * (count - len(whole.encode()))
        assert state.output().text == expected
        assert not streams or "".join(pieces) == expected


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xe4\xbd", "\ufffd\ufffd"),
        (b"\xe4\xbdA", "\ufffd\ufffdA"),
        (b"\xf0\x9f\x98\xe4\xbd\xa0", "\ufffd\ufffd\ufffd你"),
        (b"\xe4\xbd\xa0\xe5\xa5\xbd\xe4", "你好\ufffd"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),  # a surrogate
        (b"\xc0\xaf", "\ufffd\ufffd"),  # overlong
        (b"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"),  # above U+10FFFF
        (b"\xef\xbf\xbd\x80", "\ufffd\ufffd"),  # U+FFFD itself
    ],
)
def test_each_byte_that_cannot_be_decoded_is_one_replacement_character(data, text):
    assert decode(data) == text
    for cut in range(len(data) + 1):
        decoder = Utf8Decoder()
        assert decoder.decode(data[:cut]) + decoder.decode(data[cut:]) + decoder.decode(b"", is_last=True) == text


def test_all_pairs_of_bytes_behind_the_beginnings_of_characters():
    for lead in (b"", b"\xe4", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xed"):
        for first in range(0x7F, 0x100):
            for second in (0x41, 0x80, 0xBD, 0xC3, 0xE4, 0xF0, 0xFF):
                data, decoder = lead + bytes([first, second]), Utf8Decoder()
                pieces = [decoder.decode(bytes([byte])) for byte in data]
                assert "".join(pieces) + decoder.decode(b"", is_last=True) == decode(data)


# Decoders whose tokens have no bytes of their own.


def write_word_piece(directory: Path) -> list[str]:
    words = ["[UNK]", *string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase), "the", "fox", "."]
    library = FastTokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    library.save(str(directory / "tokenizer.json"))
    return words


def test_tokens_without_bytes_are_decoded_by_the_library(tmp_path):
    words = write_word_piece(tmp_path)
    tokenizer, library = Tokenizer(tmp_path), FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert isinstance(tokenizer.further_decoder(), ContextDecoder)
    rng = random.Random(4)
    for _ in range(50):
        token_ids = rng.choices(range(1, len(words)), k=12)
        expected = library.decode(token_ids, skip_special_tokens=False)
        assert tokenizer.decode(token_ids) == expected
        pieces = stream(Detokenizer(tokenizer.further_decoder()), token_ids)
        assert "".join(pieces) == expected and pieces[-1] == ""


def test_replacement_behind_byte_level_letters_is_left_to_the_library():
    steps = [{"type": "ByteLevel"}, {"type": "Replace", "pattern": {"String": "x"}, "content": "y"}]
    assert read_byte_rules({"type": "Sequence", "decoders": steps[:1]}, {0: "x"}.get)
    assert read_byte_rules({"type": "Sequence", "decoders": steps}, {0: "x"}.get) is None


@pytest.mark.parametrize("fuse", [[], [{"type": "Fuse"}]])
def test_replacement_behind_byte_fallback_is_left_to_the_library(tmp_path, fuse):
    """The bytes of an ``x`` are replaced, too."""
    replace = {"type": "Replace", "pattern": {"String": "x"}, "content": "y"}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, *fuse, replace]}
    library = FastTokenizer(models.WordLevel({"a": 0, "<0x78>": 1}, unk_token="a"))
    values = json.loads(library.to_str()) | {"decoder": decoder}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = Tokenizer(tmp_path)
    expected = FastTokenizer.from_str(json.dumps(values)).decode([0, 1, 0])
    assert "y" in expected and tokenizer.decode([0, 1, 0]) == expected


def test_text_that_becomes_shorter_does_not_come_twice():
    texts = {0: "", 1: "ab\ufffd", 2: "a\ufffd", 3: "abc"}
    decoder = ContextDecoder(lambda token_ids: texts[len(token_ids)])
    assert [decoder.add(token_id) for token_id in range(3)] == ["ab", "", "c"]
    assert decoder.finish() == ""


def test_text_offsets_never_go_back(vocabulary):
    rng = random.Random(7)
    for _ in range(50):
        _, offsets = TokenOffsets(vocabulary.ours).read(vocabulary.draw(rng))
        assert all(before <= after for before, after in pairwise(offsets))
