"""Mutated ``tokenizer.json`` and ``tokenizer_config.json``: read, or refused in one line."""

from __future__ import annotations

import json

from fuzzing import fuzz, mutate_json

from labinfer.base.errors import UserError
from labinfer.text.tokenizer import Tokenizer

VOCABULARY = {token: number for number, token in enumerate(("<unk>", "<s>", "Ġ", "h", "i", "hi", "Ġhi", "b", "a"))}
SPLIT = {"type": "Split", "pattern": {"Regex": r"\p{L}+|\s+(?!\S)|\s+"}, "behavior": "Isolated", "invert": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 0,
            "content": "<unk>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        },
        {
            "id": 9,
            "content": "<x>",
            "single_word": False,
            "lstrip": True,
            "rstrip": False,
            "normalized": True,
            "special": False,
        },
    ],
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"String": "  "}, "content": " "}],
    },
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTE_LEVEL]},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    },
    "decoder": BYTE_LEVEL,
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": VOCABULARY,
        "merges": [["h", "i"], ["Ġ", "hi"]],
    },
}
OTHER_TOKENIZER = TOKENIZER | {
    "normalizer": {"type": "Prepend", "prepend": "▁"},
    "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    "post_processor": None,
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "model": {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["▁hi", -1.5], ["h", -2.0]],
        "byte_fallback": True,
    },
}
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "<x>"},
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}],
    "response_template": {
        "start_anchor": "<x>",
        "fields": {"reasoning": {"open_pattern": "h.", "close": "</h>", "optional": True}, "content": {}},
    },
}


def test_tokenizers_are_read_or_refused(cases, tmp_path):
    file = tmp_path / "tokenizer.json"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        tokenizer = Tokenizer(tmp_path)
        ids = tokenizer.encode_within("hi  hi <x>hi\n你好 🦊 <s>" + "a" * 300 + "\0", 1000)
        tokenizer.decode(ids)
        tokenizer.further_decoder().decode(ids[1:])
        for token in (*ids[:3], tokenizer.vocab_size - 1):
            tokenizer.token_text(token)

    seeds = [json.dumps(each).encode() for each in (TOKENIZER, OTHER_TOKENIZER)]
    counts = fuzz(read, seeds, refusals=(UserError,), change=mutate_json, **cases(100))
    assert counts["taken"] > counts.total() // 20, "the seeds are refused before anything is read"


def test_configs_of_tokenizers_are_read_or_refused(cases, tmp_path, caplog):
    caplog.set_level("CRITICAL", logger="labinfer")  # or all warnings are kept to the end
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))

    def read(data: bytes) -> None:
        (tmp_path / "tokenizer_config.json").write_bytes(data)
        tokenizer = Tokenizer(tmp_path)
        ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        if (parser := tokenizer.reply_parser(ids, [])) is not None:
            parser.feed("hi hi</h>hi")

    fuzz(read, [json.dumps(CONFIG).encode()], refusals=(UserError,), change=mutate_json, **cases(100))
