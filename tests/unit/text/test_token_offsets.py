"""Texts and positions of tokens beside Transformers', and texts that go on from a prompt; for SentencePiece models, too."""

from __future__ import annotations

import json

import pytest
from llama_tokenizer import llama_tokenizer

from labinfer.base.plan import TokenLogprobs
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import AnswerUpdate, FinishReason, Request
from labinfer.requests.openai.completions import Echo, text_choice
from labinfer.requests.outputs import RequestState
from labinfer.text.token_offsets import TokenOffsets
from labinfer.text.tokenizer import Tokenizer

TEXTS = [
    "the quick brown fox",
    "Hello world leaves",
    "你好,世界。今天天气很好",
    "naïve café 🦊🦊 done ½",
    "two  spaces\n\n\ttab ",
    "x",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "the fox"},
    {"role": "assistant", "content": "quick 你好"},
    {"role": "user", "content": "brown"},
]


@pytest.fixture(scope="module")
def theirs(sp_directory):
    return llama_tokenizer(sp_directory)


@pytest.fixture(scope="module", params=["tokenizer.model", "tokenizer.json"])
def ours(request, sp_directory, theirs, tmp_path_factory):
    """Ours from each of the two files; the second one is what Transformers makes of the first."""
    if request.param == "tokenizer.model":
        return Tokenizer(sp_directory)
    directory = tmp_path_factory.mktemp("fast")
    theirs.save_pretrained(directory)
    return Tokenizer(directory)


def test_special_tokens_of_a_chat_template_are_those_of_the_vocabulary(sp_directory, theirs, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((sp_directory / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    ids = Tokenizer(tmp_path).encode_chat(TALK)
    assert ids == theirs.apply_chat_template(TALK, chat_template=TEMPLATE, return_dict=False)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)


def test_special_tokens_map_names_them_too(sp_directory, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((sp_directory / "tokenizer.model").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "</s>"}}))
    assert Tokenizer(tmp_path).encode_chat(TALK) == [2, 2]


@pytest.mark.parametrize(
    ("config", "before", "behind"),
    [({}, [1], []), ({"add_bos_token": False}, [], []), ({"add_eos_token": True}, [1], [2])],
)
def test_config_says_what_stands_around_a_text(sp_directory, sp, tmp_path, config, before, behind):
    (tmp_path / "tokenizer.model").write_bytes((sp_directory / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("the fox") == before + sp.encode("the fox", add_special_tokens=False) + behind


def test_text_without_a_space_before_it(sp_directory, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((sp_directory / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": False}))
    ours, theirs = Tokenizer(tmp_path), llama_tokenizer(sp_directory, add_prefix_space=False)
    for text in (*TEXTS, " the fox"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == text == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_stand_where_transformers_puts_them(ours, theirs, text):
    read = theirs(text, return_offsets_mapping=True)
    ids = ours.encode(text)
    assert ids == read["input_ids"]
    tokens, offsets = TokenOffsets(ours).read_prompt(ids, text)
    assert offsets == [begin for begin, _ in read["offset_mapping"]]
    for token, (begin, end) in zip(tokens[1:], read["offset_mapping"][1:], strict=True):
        assert token in (text[begin:end], "\ufffd", ""), "the last is SentencePiece's own space alone"
    assert "\ufffd" in tokens or "".join(tokens[1:]) == text


@pytest.mark.parametrize("text", TEXTS)
def test_answer_goes_on_as_transformers_decodes_it(ours, theirs, text):
    ids = ours.encode(text)
    for cut in range(2, len(ids)):
        begin = theirs.decode(ids[:cut], skip_special_tokens=True)
        if "\ufffd" not in begin:
            whole = theirs.decode(ids, skip_special_tokens=True)
            assert ours.further_decoder().decode(ids[cut:]) == whole[len(begin) :]


@pytest.mark.parametrize("kind", ["sp", "bpe"])
@pytest.mark.parametrize("streams", [False, True])
def test_echo_and_answer_join_to_one_text(kind, streams, request):
    tokenizer, text = request.getfixturevalue(kind), "Hello world leaves 你好 🦊 the fox"
    ids = tokenizer.encode(text)
    cut = len(tokenizer.encode("Hello world"))
    assert tokenizer.encode("Hello world") == ids[:cut]
    state = RequestState(
        Request(key=0, prompt_token_ids=ids[:cut], sampling=SamplingParams(logprobs=0)), tokenizer, streams
    )
    measured = [TokenLogprobs(token, -1.0, {}) for token in ids]
    pieces = []
    for index in range(cut, len(ids)):
        reason = FinishReason.LENGTH if index == len(ids) - 1 else None
        state.add(AnswerUpdate(index=0, token_ids=[ids[index]], logprobs=[measured[index]], finish_reason=reason))
        if streams:
            pieces.append(state.take_delta(0).text)
    assert not streams or "".join(pieces) == text.removeprefix("Hello world")
    output = state.output()
    echo = Echo("Hello world", ids[:cut], measured[1:cut])
    choice = text_choice(output.completions[0], output, tokenizer, echo, 0)
    assert choice.text == text
    told = choice.logprobs
    for token, begin in zip(told.tokens, told.text_offset, strict=True):
        assert text.startswith(token, begin) or token in ("<s>", "\ufffd")
    assert told.text_offset[-1] == text.rindex(told.tokens[-1])


def test_special_tokens_show_where_that_is_asked_for(bpe):
    ids = bpe.encode("a<|im_end|>b", add_special_tokens=False)
    for skip, expected in ((True, "ab"), (False, "a<|im_end|>b")):
        sampling = SamplingParams(skip_special_tokens=skip)
        for reason, token_ids in ((FinishReason.LENGTH, ids), (FinishReason.STOP, [*ids, 1])):
            state = RequestState(Request(key=0, prompt_token_ids=[5], sampling=sampling), bpe, streams=False)
            state.add(AnswerUpdate(index=0, token_ids=token_ids, finish_reason=reason))
            assert state.output().text == expected, "without the token that ended it"
