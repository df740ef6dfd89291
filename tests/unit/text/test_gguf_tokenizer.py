"""Tokenizers in GGUF files give the ids of the tokenizers that the files were made of."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import sentencepiece
from checkpoints import CHAT_TEMPLATE, CORPUS
from gguf import GGUFWriter, TokenType
from gguf_files import finish
from gguf_vocabularies import add_sentencepiece, add_tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from labinfer.base.errors import UserError
from labinfer.text.gguf_tokenizer import SPLITS, WAY_OUT
from labinfer.text.tokenizer import Tokenizer

TRICKY = [
    "",
    " ",
    "   leading, trailing   ",
    "I'LL don't we'Re 'sir' it's",
    "0123456789 12 345 6789.0",
    "line\n\n\n  next\r\n\ttab\n ",
    "a\u00a0b\u2003c\u200bd",
    "e\u0301\u0327 é ﬁ Å \u212b",
    "हिन्दी में नमस्ते العَرَبِيَّة",
    "你好,世界。今天天气很好 안녕",
    "🤦🏽‍♂️👩‍👩‍👧 ☺️",
    "<|im_start|>user\n<think> hi</think><|im_end|>\n",
    "<|im_start|>  <|im_end|>x<|im_end",
    "CamelCaseWords and SHOUTING mixedUP",
    "path/to//file.py {x: [1, 2]};// !!",
    "the quick brown fox\0 jumps ▁over▁",
]


HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK = {
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"),
    "deepseek-llm": (
        "[\r\n]",
        r"\s?[\p{Lu}\p{Ll}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        HAN,
        r"\p{N}+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ),
}
"""As the models' own files have them; letters of the first are named by their kinds, which is the same in these texts."""


SAME_SPLITS = {"hunyuan-dense": "deepseek-v3", "hunyuan": "qwen2", "glm4": "dbrx", "chatglm-bpe": "dbrx"}
"""Names whose words are those of another, by llama.cpp's src/llama-vocab.cpp."""


def splitters(name: str):
    """Normalizer, pre-tokenizer and whether whole words count, as the models' own ``tokenizer.json`` have them."""
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    is_hunyuan = name == "hunyuan"
    name = SAME_SPLITS.get(name, name)
    if name == "gpt-2":
        return None, pre_tokenizers.ByteLevel(add_prefix_space=False), False
    if name in ("smollm", "refact"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        return None, pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]), False
    if name in DEEPSEEK:
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in DEEPSEEK[name]]
        return None, pre_tokenizers.Sequence([*splits, by_bytes]), False
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    composes = not is_hunyuan and name in ("qwen2", "qwen35", "deepseek-r1-qwen")
    whole = name in ("llama-bpe", "llama3", "llama-v3", "tekken", "gpt-4o")
    return normalizers.NFC() if composes else None, pre_tokenizers.Sequence([split, by_bytes]), whole


def write_bpe(directory: Path, name: str, bos: str = "") -> Path:
    """A tokenizer whose merges go across all borders, so that how it splits a text shows."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False, min_frequency=2)
    tokenizer.train_from_iterator([*CORPUS, *TRICKY] * 3, trainer)
    values = json.loads(tokenizer.to_str())
    normalizer, splitter, whole = splitters(name)
    values["model"]["ignore_merges"] = whole
    tokenizer = FastTokenizer.from_str(json.dumps(values))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    if bos:
        special = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_gguf_of(directory: Path, pre: str) -> Path:
    path = directory / "model.gguf"
    writer = GGUFWriter(path, "llama")
    add_tokenizer(writer, directory, pre)
    finish(writer)
    return path


@pytest.mark.parametrize("pre", SPLITS)
def test_bpe_gives_the_same_ids(tmp_path, pre):
    bos = "<|endoftext|>" if SPLITS[pre].begins else ""
    own = Tokenizer(write_bpe(tmp_path, pre, bos))
    made = Tokenizer(write_gguf_of(tmp_path, pre))
    assert made.vocab_size == own.vocab_size
    assert made.added_tokens == own.added_tokens
    different = 0
    plain = Tokenizer(write_bpe(tmp_path, "gpt-2"))
    for text in TRICKY:
        ids = own.encode(text)
        assert made.encode(text) == ids, text
        assert made.decode(ids) == own.decode(ids) and made.reply_decoder().decode(ids) == own.reply_decoder().decode(
            ids
        )
        assert made.encode(text, add_special_tokens=False) == own.encode(text, add_special_tokens=False)
        different += own.encode(text, add_special_tokens=False) != plain.encode(text)
    assert different or pre == "gpt-2", "the texts do not tell this way to split from another"


def test_split_of_every_name_is_transformers():
    for name, split in SPLITS.items():
        if name in GGUF_PRE_TOKENIZER_SPLITS:
            assert split.pattern == GGUF_PRE_TOKENIZER_SPLITS[name]


def test_chat_template_is_the_files(tmp_path):
    directory = write_bpe(tmp_path, "qwen2")
    messages = [{"role": "user", "content": "hello <think>"}]
    made, own = Tokenizer(write_gguf_of(directory, "qwen2")), Tokenizer(directory)
    assert made.encode_chat(messages) == own.encode_chat(messages)
    assert made.render_chat(messages) == own.render_chat(messages)


def test_file_says_whether_texts_begin_with_a_token(tmp_path):
    path = tmp_path / "model.gguf"
    for says, begins in ((True, True), (False, False)):
        writer = GGUFWriter(path, "llama")
        add_tokenizer(writer, write_bpe(tmp_path, "qwen2"), "qwen2")
        writer.add_add_bos_token(says)
        writer.add_add_eos_token(not says)
        finish(writer)
        tokenizer = Tokenizer(path)
        ends = tokenizer.added_tokens["<|endoftext|>"], tokenizer.added_tokens["<|im_end|>"]
        ids = tokenizer.encode("hi")
        assert (ids[0] == ends[0], ids[-1] == ends[1]) == (begins, not begins)
        assert ends[0] not in tokenizer.encode("hi", add_special_tokens=False)


ADDED = [("<|im_start|>", TokenType.CONTROL), ("<think>", TokenType.USER_DEFINED)]


@pytest.mark.parametrize("has_space", [True, False])
def test_sentencepiece_gives_the_same_ids(tmp_path, sp_directory, has_space):
    (tmp_path / "tokenizer.model").write_bytes((sp_directory / "tokenizer.model").read_bytes())
    size = Tokenizer(sp_directory).vocab_size
    added = {size + index: entry for index, entry in enumerate(ADDED)}
    decoder = {str(n): {"content": text, "special": kind == TokenType.CONTROL} for n, (text, kind) in added.items()}
    config = {"added_tokens_decoder": decoder, "chat_template": CHAT_TEMPLATE}
    if not has_space:
        config["add_prefix_space"] = False
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    add_sentencepiece(writer, tmp_path / "tokenizer.model", added)
    writer.add_add_space_prefix(has_space)
    writer.add_chat_template(CHAT_TEMPLATE)
    finish(writer)
    own, made = Tokenizer(tmp_path), Tokenizer(tmp_path / "model.gguf")
    assert (made.vocab_size, made.added_tokens) == (own.vocab_size, own.added_tokens)
    for text in [*TRICKY, "</s>x<s>", "<unk> y"]:
        ids = own.encode(text)
        assert made.encode(text) == ids, text
        assert made.decode(ids) == own.decode(ids) and made.further_decoder().decode(
            ids
        ) == own.further_decoder().decode(ids)
        assert made.encode_chat([{"role": "user", "content": text}]) == own.encode_chat(
            [{"role": "user", "content": text}]
        )
    with pytest.raises(UserError, match="needs a tokenizer.json"):
        from labinfer.text.guidance import need_json_file

        need_json_file(made)


def test_unknown_tokenizers_are_refused_with_the_way_out(tmp_path):
    path = tmp_path / "model.gguf"

    def refusal(model: str | None, pre: str | None, **more) -> str:
        writer = GGUFWriter(path, "llama")
        if model:
            writer.add_tokenizer_model(model)
        if pre:
            writer.add_tokenizer_pre(pre)
        for key, value in more.items():
            getattr(writer, key)(value)
        finish(writer)
        with pytest.raises(UserError, match=r"model\.gguf") as error:
            Tokenizer(path)
        assert WAY_OUT in str(error.value) and "\n" not in str(error.value)
        return str(error.value)

    assert "tokenizer 'bert' of GGUF files is not supported; supported are gpt2 and llama" in refusal("bert", None)
    assert "pre-tokenizer 'poro-chat' of GGUF files is not supported; supported are gpt-2, llama3" in refusal(
        "gpt2", "poro-chat"
    )
    assert "pre-tokenizer 'none'" in refusal("gpt2", None)
    assert "has no tokenizer" in refusal(None, None)
    assert "has 0 tokens" in refusal("gpt2", "qwen2")
    assert "has 2 tokens but scores of 0" in refusal("llama", None, add_token_list=["a", "b"])
    text = refusal("gpt2", "qwen2", add_token_list=["a", "b"], add_token_merges=["a b"], add_eos_token_id=7)
    assert "eos_token_id is 7, but the vocabulary has 2 tokens" in text


def test_merges_that_make_no_token_are_refused(tmp_path):
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b"])
    writer.add_token_merges(["a b"])
    finish(writer)
    with pytest.raises(UserError, match="not a valid tokenizer"):
        Tokenizer(tmp_path / "model.gguf")


def test_structured_outputs_know_the_vocabulary(tmp_path):
    from labinfer.text.guidance import GuidanceVocabulary

    tokenizer = Tokenizer(write_gguf_of(write_bpe(tmp_path, "qwen2"), "qwen2"))
    end = tokenizer.added_tokens["<|im_end|>"]
    assert GuidanceVocabulary(tokenizer, tokenizer.vocab_size, [end]).tokenizer.vocab_size >= tokenizer.vocab_size - 1


def test_names_of_kinds_are_the_references():
    from labinfer.text import gguf_tokenizer

    for kind in gguf.TokenType:
        assert getattr(gguf_tokenizer, kind.name) == kind.value


def test_gemmas_tokenizer_gives_the_ids_of_transformers(tmp_path):
    """Runs of spaces and of line ends are tokens, and no text begins with a space of the tokenizer's own."""
    runs = ["\n\n", "\n\n\n", *("▁" * count for count in range(2, 6)), "<table>"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS, *filter(str.strip, TRICKY[:-1])] * 20),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=620,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        user_defined_symbols=runs,
        minloglevel=2,
    )
    path = tmp_path / "model.gguf"
    for spaces in (" ", "▁"):  # both are written by converters
        writer = GGUFWriter(path, "gemma3")
        add_sentencepiece(writer, tmp_path / "tokenizer.model", {}, runs, spaces)
        writer.add_add_space_prefix(False)
        finish(writer)
        architecture, values, _ = get_gguf_tokenizer(str(path))
        oracle, _ = convert_gguf_tokenizer(architecture, values)
        made = Tokenizer(path)
        for text in [
            *TRICKY[:-1],
            "a  b   c    d     e",
            "def f():\n    x\n\n\n\n  <table>y",
            "<start_of_turn>user\nhi<end_of_turn>\n",
        ]:
            ids = oracle.encode(text, add_special_tokens=False).ids
            assert made.encode(text, add_special_tokens=False) == ids, text
            assert made.encode(text) == [2, *ids]
            assert made.decode(ids) == oracle.decode(ids).replace("<start_of_turn>", ""), text
