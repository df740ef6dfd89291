"""Both kinds of tokenizer, and text that comes out token by token."""

from __future__ import annotations

import json
import random

import pytest
from llama_tokenizer import llama_tokenizer
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AddedToken, AutoTokenizer

from labinfer.base.errors import UserError
from labinfer.text.detokenizer import Detokenizer
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.tokenizer_patterns import check_patterns

TEXTS = [
    "the quick brown fox",
    "你好,世界。今天天气很好",
    "naïve café 🦊🦊 done",
    "  two  spaces\n\n\ttab ",
    "x",
    "👩‍👩‍👧‍👦 a family, then ½ and é",
]


# Tokenizers.


@pytest.mark.parametrize("kind", ["bpe", "sp"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_way_there_and_back(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_special_tokens_do_not_show_in_text(bpe):
    ids = bpe.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == 2 and ids[-1] == 1
    assert bpe.decode(ids) == "hi"


def test_sentencepiece_begins_with_its_bos_token_unless_told_not_to(sp):
    assert sp.encode("the fox")[0] == 1
    assert sp.encode("the fox", add_special_tokens=False) == sp.encode("the fox")[1:]


def test_sentencepiece_passes_over_control_and_unknown_ids(sp):
    ids = sp.encode("the fox", add_special_tokens=False)
    assert sp.decode([1, *ids, 2, sp.vocab_size + 7]) == "the fox"


def test_added_tokens_are_known_by_their_text(bpe_directory, tmp_path, bpe, sp):
    vocabulary = json.loads((bpe_directory / "tokenizer.json").read_text())
    like = vocabulary["added_tokens"][0]
    for index, (text, special) in enumerate([("<tool_call>", False), ("<secret>", True)]):
        vocabulary["added_tokens"].append(like | {"id": bpe.vocab_size + index, "content": text, "special": special})
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.added_tokens["<tool_call>"] == bpe.vocab_size and "<secret>" in tokenizer.added_tokens
    assert tokenizer.decode([bpe.vocab_size, bpe.vocab_size + 1]) == "<tool_call>"
    assert "<tool_call>" not in bpe.added_tokens and sp.added_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}


def test_file_that_makes_the_library_panic_is_refused(bpe_directory, tmp_path):
    vocabulary = json.loads((bpe_directory / "tokenizer.json").read_text())
    vocabulary["model"]["continuing_subword_prefix"] = "longer than any token"
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(UserError, match=r"tokenizer.json is not a valid tokenizer: "):
        Tokenizer(tmp_path)


def test_ids_are_those_of_transformers(bpe_directory, bpe):
    theirs = AutoTokenizer.from_pretrained(bpe_directory)
    for text in TEXTS:
        assert bpe.encode(text) == theirs(text)["input_ids"]


TRICKY = [
    "",
    " ",
    "\n\n \t",
    "你好，世界！𠮷野家",
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽",
    "e\u0301 é ﬁ Ａ ｶﾞ",
    "\u200b\ufeff\u00a0x\u202e",
    "क्षत्रिय ภาษาไทย العربية",
    "<|im_start|>user\n<|im_end|><|endoftext|>",
    "a<|im_end|>b <|im_en",
    "<think>\n</think> [TOOL_CALLS] <|channel|>",
    "½²³ 1234567890 0x1F 1e-9",
    "don't DON'T we'll",
    "\x00\x01\x7f",
    "\r\n\r  \u2028",
    "�� replaced",
    "aaaa" * 200,
]


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_texts_are_read_as_transformers_reads_them(bpe_directory, bpe, text):
    theirs = AutoTokenizer.from_pretrained(bpe_directory)
    for special in (True, False):
        ids = bpe.encode(text, add_special_tokens=special)
        assert ids == theirs(text, add_special_tokens=special)["input_ids"]
        assert bpe.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


ADDED = {"<|im_end|>": True, "<think>": False, "</think>": False}
"""Tokens that a checkpoint adds, and whether they are special."""


@pytest.fixture(scope="module", params=[False, True], ids=["new", "legacy"])
def with_added_tokens(request, sp, sp_directory, tmp_path_factory):
    """Ours and Transformers' tokenizer of a SentencePiece model with further tokens, in each of its ways with spaces."""
    directory = tmp_path_factory.mktemp("added")
    (directory / "tokenizer.model").write_bytes((sp_directory / "tokenizer.model").read_bytes())
    decoder = {str(360 + index): {"content": text, "special": ADDED[text]} for index, text in enumerate(ADDED)}
    config = {"legacy": request.param, "added_tokens_decoder": decoder}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = llama_tokenizer(directory, legacy=request.param)
    for text, special in ADDED.items():
        theirs.add_tokens(AddedToken(text, special=special, normalized=False), special_tokens=special)
    return Tokenizer(directory), theirs


@pytest.mark.parametrize("text", [*TRICKY, "<s>hi</s> there<unk>", "<think> so\n</think>So<|im_end|> x", "<s> <s>"])
def test_tricky_texts_are_read_as_transformers_reads_them_with_sentencepiece(with_added_tokens, text):
    if text.startswith(" "):
        pytest.skip("SentencePiece itself puts its own space before one that is there, and Transformers does not")
    ours, theirs = with_added_tokens
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs(text, add_special_tokens=special)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_added_tokens_without_text_are_refused(sp_directory, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((sp_directory / "tokenizer.model").read_bytes())
    for decoder in ({"5": {}}, {"x": {"content": "a"}}, {"5": "a"}, [5]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
        with pytest.raises(UserError, match="added tokens without text or id"):
            Tokenizer(tmp_path)


def test_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer.json and no tokenizer.model"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe\x00 nonsense"])
def test_broken_tokenizer_is_refused_by_its_path(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=name):
        Tokenizer(tmp_path)


# Detokenisation.


@pytest.mark.parametrize("kind", ["bpe", "sp"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_grows_to_what_decoding_everything_gives(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    detokenizer, seen = Detokenizer(tokenizer.reply_decoder()), ""
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert detokenizer.add(token) is False
        assert detokenizer.text.startswith(seen)
        seen = detokenizer.text
        assert "\ufffd" not in seen, "half a character was let out"
        assert text.startswith(seen)
    assert seen == text


def test_random_texts_come_out_whole(bpe, sp):
    rng, alphabet = random.Random(5), "ab cd\n世界🦊é½.the"
    for tokenizer in (bpe, sp):
        for _ in range(60):
            text = "".join(rng.choices(alphabet, k=rng.randint(1, 40)))
            detokenizer = Detokenizer(tokenizer.reply_decoder())
            for token in tokenizer.encode(text, add_special_tokens=False):
                detokenizer.add(token)
            assert detokenizer.text == text


def test_random_tokens_read_as_decoding_them_all_at_once(bpe):
    """Most are parts of characters, which belong together only sometimes."""
    rng = random.Random(6)
    letters = [token for token in range(bpe.vocab_size) if bpe.decode([token]) == "\ufffd"]
    for _ in range(300):
        tokens = [rng.choice(letters) if rng.random() < 0.9 else rng.randrange(bpe.vocab_size) for _ in range(40)]
        detokenizer, seen = Detokenizer(bpe.reply_decoder()), ""
        for token in tokens:
            detokenizer.add(token)
            assert detokenizer.text.startswith(seen)
            seen = detokenizer.text
        detokenizer.finish()
        assert detokenizer.text == bpe.decode(tokens)


def test_bytes_that_are_no_text_are_shown_in_the_end(bpe):
    byte = bpe.encode("界", add_special_tokens=False)[0]
    detokenizer = Detokenizer(bpe.reply_decoder())
    for _ in range(12):
        detokenizer.add(byte)
    assert detokenizer.text and set(detokenizer.text) == {"\ufffd"}
    for token in bpe.encode(" done"):
        detokenizer.add(token)
    assert detokenizer.text.endswith(" done")


@pytest.mark.parametrize("kind", ["bpe", "sp"])
@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("the quick brown fox", ("brown",), "the quick "),
        ("the quick brown fox", ("ck br",), "the qui"),
        ("the quick brown fox", ("k",), "the quic"),
        ("the quick brown fox", ("fox", "quick"), "the "),
        ("the quick brown fox", ("quick brown", "brown"), "the "),
        ("0123456789", ("789", "345"), "012"),
        ("a\n\nb", ("\n\n",), "a"),
        ("今天天气很好", ("天气",), "今天"),
        ("end 🦊 of it", ("🦊",), "end "),
        ("the the the", ("the",), ""),
    ],
)
def test_text_ends_before_a_stop_string_however_it_is_split(kind, text, stop, kept, request):
    tokenizer = request.getfixturevalue(kind)
    detokenizer = Detokenizer(tokenizer.reply_decoder(), stop)
    stopped = [detokenizer.add(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert detokenizer.stopped_by in stop and any(stopped)
    detokenizer = Detokenizer(tokenizer.reply_decoder(), stop)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if detokenizer.add(token):
            break
    assert detokenizer.text == kept


def test_stop_string_that_only_begins_does_not_stop(bpe):
    detokenizer = Detokenizer(bpe.reply_decoder(), ("foxes", "THE"))
    for token in bpe.encode("the quick brown fox"):
        assert not detokenizer.add(token)
    assert detokenizer.text == "the quick brown fox"


def test_what_ended_before_it_could_stop_does_not_stop_later(bpe):
    detokenizer = Detokenizer(bpe.reply_decoder(), ("q", "a long stop string"))
    pieces = []
    for index, token in enumerate(bpe.encode("the quick brown fox")):
        detokenizer.add(token, may_stop=index > 8)
        pieces.append(detokenizer.take_new())
    detokenizer.finish()
    assert detokenizer.text == "the quick brown fox" == "".join(pieces) + detokenizer.take_new()


def test_beginning_of_a_stop_string_is_held_back(bpe):
    detokenizer = Detokenizer(bpe.reply_decoder(), ("brown dog",), include_stop=True)
    shown = ""
    for token in bpe.encode("the brown fox"):
        detokenizer.add(token)
        shown += detokenizer.take_new()
        assert not any(shown.endswith("brown dog"[:length]) for length in range(1, 9))
    detokenizer.finish()
    assert shown + detokenizer.take_new() == "the brown fox"


SPLITS = {
    "cl100k": r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    "o200k": r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    "deepseek": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*""",
    "gpt2": r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    "digits": r"\d{1,3}(?=(?:\d{3})*\b)",
    "han": "[一-龥぀-ゟ゠-ヿ]+",
    "line ends": r"(?:\r\n|\n)+| ?(?:(?:\r\n|\n|x)y)*",
    "words": r"(?:ab){3}[[a-z]&&[^x]]+(?>a+)*",
}
EXPLODING = [
    "(a+)+$",
    "(a|a)*$",
    "(?:a?b?)+x",
    "((?:ab)*)*",
    "(?:(?:a|b){2,9})+",
    r"(\s*x?){40}",
    ".*.*.*.*=x",
    "(?i:a*){2,}",
    "(?i:a|A)*$",
    "(?:ab|a)+(?:a|aa)*$",
    "(?:a|)+$",
    "(?:|a)+$",
    "(?:a|[a-c])+$",
    r"(?:a|\x61)+$",
    "(?:a|.)+$",
    "(?:b?a|c)+$",
    "(?:a|b?)+$",
]


@pytest.mark.parametrize("name", SPLITS)
def test_patterns_of_known_tokenizers_are_taken(name):
    check_patterns(pre_tokenizers.Split(Regex(SPLITS[name]), "isolated"))


@pytest.mark.parametrize("pattern", EXPLODING)
def test_pattern_that_explodes_is_refused_by_name(tmp_path, pattern):
    library = FastTokenizer(models.BPE({"a": 0}, []))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.Split(Regex(pattern), "isolated")]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="tokenizer.json is not supported: its pattern .* can take exponential time"):
        Tokenizer(tmp_path)
