"""read_gguf_tokenizer: converts tokenizers in GGUF files for the tokenizers library or SentencePiece.

The metadata key ``tokenizer.ggml.model`` says for which library. ``gpt2`` is byte-level BPE; the GGUF file has only the name of its
pre-tokenizer (``tokenizer.ggml.pre``). ``llama`` is SentencePiece's BPE, whose scores give the order of merges.

Source: ggml-org/llama.cpp, src/llama-vocab.cpp and convert_hf_to_gguf.py; google/sentencepiece, src/sentencepiece_model.proto.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError
from labinfer.text.tokenizer_backends import FastBackend, SentencePieceBackend, TokenizerBackend
from labinfer.weights.gguf.file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types in ``tokenizer.ggml.token_type``, as in SentencePiece."""
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens that chat templates may name → names in GGUF metadata."""
WAY_OUT = "give --tokenizer DIR with the tokenizer of the original model"


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """Rules by which a text is split into words before BPE merges."""

    pattern: str = ""
    """Regular expression that matches a word; empty for GPT-2's."""
    first: tuple[str, ...] = ()
    """Regular expressions that split the text, in this order, before ``pattern`` splits the parts."""
    single_digits: bool = False
    """Whether each digit is a word by itself."""
    composes: bool = False
    """Whether the text is first normalized to Unicode NFC."""
    whole_words: bool = False
    """Whether a word that is in the vocabulary becomes one token without merges (``ignore_merges``)."""
    begins: bool = False
    """Whether texts begin with the BOS token, if the GGUF file does not say."""


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD, WORD_WITH_MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
SIGNS, SIGNS_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
LLAMA3 = PreTokenizer(
    pattern="|".join((CONTRACTIONS, WORD, r"\p{N}{1,3}", SIGNS, SPACES)), whole_words=True, begins=True
)
QWEN2 = PreTokenizer(pattern="|".join((CONTRACTIONS, WORD, r"\p{N}", SIGNS, SPACES)), composes=True)
QWEN35 = PreTokenizer(
    pattern="|".join((CONTRACTIONS, WORD_WITH_MARKS, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", SPACES)),
    composes=True,
)
GPT4O = PreTokenizer(
    pattern="|".join((*(f"{word}{CONTRACTIONS}?" for word in CASED), r"\p{N}{1,3}", SIGNS_WITH_SLASH, SPACES)),
    whole_words=True,
)
TEKKEN = PreTokenizer(pattern="|".join((*CASED, r"\p{N}", SIGNS_WITH_SLASH, SPACES)), whole_words=True, begins=True)
CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥ"
    "ῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Character ranges of letters in scripts with upper and lower case, as in the pattern of DeepSeek's first tokenizer. Some letters
resemble Latin ones."""
EAST_ASIAN = "[一-龥ࠀ-一가-퟿]+"
DEEPSEEK_LLM = PreTokenizer(
    first=("[\r\n]", rf"\s?[{CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", EAST_ASIAN),
    pattern=r"\p{N}+",
)
DEEPSEEK_CODER = PreTokenizer(first=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN), pattern=r"\p{N}")
DEEPSEEK_V3 = PreTokenizer(
    first=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"),
    pattern="|".join(
        (
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            SPACES,
        )
    ),
)
SPLITS = {
    "gpt-2": PreTokenizer(),
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "qwen35": QWEN35,
    "gpt-4o": GPT4O,
    "tekken": TEKKEN,
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-v3": DEEPSEEK_V3,
    "smollm": PreTokenizer(single_digits=True),
    "refact": PreTokenizer(single_digits=True),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer(pattern=LLAMA3.pattern)),
    "minimax-m2": replace(GPT4O, whole_words=False),
    "hunyuan": PreTokenizer(pattern=QWEN2.pattern),
    "hunyuan-dense": DEEPSEEK_V3,
}
"""Pre-tokenizers by their names in ``tokenizer.ggml.pre``."""


def read_gguf_tokenizer(path: Path) -> tuple[TokenizerBackend, dict[str, Any]]:
    """Read the tokenizer in a GGUF file. Also returns the values that ``tokenizer_config.json`` would have.

    Raises:
        UserError: the file has no tokenizer, or an unsupported one; the message names it and a workaround.
    """
    file = GgufFile(path)
    kind = file.get("tokenizer.ggml.model", str, "none")
    if kind == "gpt2":
        return FastBackend(path, json.dumps(_byte_level(file))), _config(file)
    if kind == "llama":
        config = _sentencepiece_config(file)
        return SentencePieceBackend(path, _sentencepiece_model(file), config), _config(file)
    if kind in ("none", "no_vocab"):
        raise UserError(f"{path} has no tokenizer; {WAY_OUT}, or prompts as token ids")
    raise UserError(
        f"{path}: tokenizer {kind!r:.40} of GGUF files is not supported; supported are gpt2 and llama; {WAY_OUT}"
    )


def fast_tokenizer_source(path: Path) -> str:
    """Source from which llguidance reads a tokenizer: the path of a ``tokenizer.json``, or such a file's contents made
    from a GGUF file."""
    return json.dumps(_byte_level(GgufFile(path))) if path.suffix == ".gguf" else str(path)


def _config(file: GgufFile) -> dict[str, Any]:
    """Chat templates and texts of special tokens in a GGUF file, with the keys of ``tokenizer_config.json``."""
    templates = {"default": file.get("tokenizer.chat_template", str, "")}
    for name in file.texts("tokenizer.chat_templates"):
        templates[name] = file.get(f"tokenizer.chat_template.{name}", str, "")
    given = [{"name": name, "template": text} for name, text in templates.items() if text]
    tokens = file.texts("tokenizer.ggml.tokens")
    named = {f"{name}_token": tokens[id_] for name in NAMED if (id_ := _named_id(file, name, len(tokens))) is not None}
    return named | ({"chat_template": given} if given else {})


def _named_id(file: GgufFile, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{NAMED[name]}_token_id"
    if key not in file:
        return None
    token_id = file.get(key, int)
    if token_id == 0xFFFFFFFF:  # the file has no such token
        return None
    if not 0 <= token_id < count:
        raise UserError(f"{file.path}: {key} is {token_id}, but the vocabulary has {count} tokens; {WAY_OUT}")
    return token_id


def _vocabulary(file: GgufFile) -> list[tuple[str, int]]:
    """Text and type of each token in a GGUF file.

    Raises:
        UserError: there are no tokens, or not as many types as tokens.
    """
    texts = file.texts("tokenizer.ggml.tokens")
    kinds = file.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(texts)
    if not texts or len(kinds) != len(texts):
        raise UserError(f"{file.path} has {len(texts)} tokens but token types of {len(kinds)}; {WAY_OUT}")
    return list(zip(texts, kinds, strict=True))


# Byte-level BPE, converted to tokenizer.json.


def _byte_level(file: GgufFile) -> dict[str, Any]:
    """Contents of a ``tokenizer.json`` for the byte-level BPE tokenizer in a GGUF file."""
    name = file.get("tokenizer.ggml.pre", str, "none")
    if name not in SPLITS:
        raise UserError(
            f"{file.path}: pre-tokenizer {name!r:.40} of GGUF files is not supported; supported are "
            f"{', '.join(SPLITS)}; {WAY_OUT}"
        )
    split, tokens = SPLITS[name], _vocabulary(file)
    added = [
        {"id": number, "content": text, "special": kind == CONTROL, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, (text, kind) in enumerate(tokens)
        if kind in (CONTROL, USER_DEFINED) and text
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not split.pattern}
    steps = [{"type": "Digits", "individual_digits": True}] if split.single_digits else []
    patterns = [*split.first, split.pattern] if split.pattern else []
    for pattern in patterns:
        steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if split.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "post_processor": _ends(file, split, [text for text, _ in tokens]),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split.whole_words,
            "vocab": {text: number for number, (text, kind) in enumerate(tokens) if kind != UNUSED},
            "merges": file.texts("tokenizer.ggml.merges"),
        },
    }


def _ends(file: GgufFile, split: PreTokenizer, texts: list[str]) -> dict[str, Any]:
    """Value of ``post_processor`` in a ``tokenizer.json``, which adds BOS and EOS tokens to a text."""
    sequence, special = [{"Sequence": {"id": "A", "type_id": 0}}], {}
    wishes = (("bos", "add_bos_token", split.begins, 0), ("eos", "add_eos_token", False, 2))
    for name, key, default, place in wishes:
        token_id = _named_id(file, name, len(texts))
        if file.get(f"tokenizer.ggml.{key}", bool, default) and token_id is not None:
            text = texts[token_id]
            sequence.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
            special[text] = {"id": text, "ids": [token_id], "tokens": [text]}
    pair = [*sequence, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": sequence, "pair": pair, "special_tokens": special}


# SentencePiece, converted to its model file, a protobuf message.


def _sentencepiece_config(file: GgufFile) -> dict[str, Any]:
    """Values of ``tokenizer_config.json`` that ``SentencePieceBackend`` reads. They make it recognize control tokens and
    user-defined tokens in texts."""
    added = {
        str(number): {"content": _as_written(text, kind), "special": kind == CONTROL}
        for number, (text, kind) in enumerate(_vocabulary(file))
        if kind in (CONTROL, USER_DEFINED) and text
    }
    return {
        "add_prefix_space": file.get("tokenizer.ggml.add_space_prefix", bool, True),
        "add_bos_token": file.get("tokenizer.ggml.add_bos_token", bool, True),
        "add_eos_token": file.get("tokenizer.ggml.add_eos_token", bool, False),
        "added_tokens_decoder": added,
    }


def _as_written(text: str, kind: int) -> str:
    """Text of a token as it occurs in texts. For user-defined tokens, some converters store SentencePiece's ``▁`` where Gemma's
    text has a space."""
    return text.replace("▁", " ") if kind == USER_DEFINED else text


def _sentencepiece_model(file: GgufFile) -> bytes:
    """Contents of a ``tokenizer.model`` for the SentencePiece tokenizer in a GGUF file: pieces, trainer and normalizer
    options."""
    tokens = _vocabulary(file)
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise UserError(f"{file.path} has {len(tokens)} tokens but scores of {len(scores)}; {WAY_OUT}")
    has_bytes = any(kind == BYTE for _, kind in tokens)
    trainer = [(3, 2), (4, len(tokens)), (35, int(has_bytes))]  # fields model_type (BPE), vocab_size, byte_fallback
    for name, number, piece in (("unk", 40, 45), ("bos", 41, 46), ("eos", 42, 47), ("pad", 43, 48)):
        token_id = _named_id(file, name, len(tokens))
        trainer.append((number, -1 if token_id is None else token_id))
        if token_id is not None:
            trainer.append((piece, tokens[token_id][0].encode()))
    has_space = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    shrinks = file.get("tokenizer.ggml.remove_extra_whitespaces", bool, False)
    normalizer = [(1, b"identity"), (2, file.raw_bytes("tokenizer.ggml.precompiled_charsmap"))]
    normalizer += [(3, int(has_space)), (4, int(shrinks)), (5, 1)]  # add_dummy_prefix, remove_extra_whitespaces, escape
    pieces = (
        (1, _message([(1, text.encode()), (2, float(score)), (3, int(kind))]))
        for (text, kind), score in zip(tokens, scores, strict=True)
    )
    return _message([*pieces, (2, _message(trainer)), (3, _message(normalizer))])


def _message(fields: list[tuple[int, int | float | bytes]]) -> bytes:
    """Encode a protobuf message with numbered ``fields``: integers, float32 numbers and bytes."""
    return b"".join(part for number, value in fields for part in _field(number, value))


def _field(number: int, value: int | float | bytes) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield from (_varint(number << 3 | 2), _varint(len(value)), value)
    elif isinstance(value, float):
        yield from (_varint(number << 3 | 5), struct.pack("<f", value))
    else:
        yield from (_varint(number << 3), _varint(value & (1 << 64) - 1))


def _varint(value: int) -> bytes:
    """Encode an integer as a protobuf varint: 7 bits per byte, the lowest bits first."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])
