"""Texts for ``bench accuracy``: what a file may hold, and how long texts are cut."""

from __future__ import annotations

import json

import pytest

from labinfer.base.errors import UserError
from labinfer.cli.bench.score_texts import STEP_TOKENS, TextBatches
from labinfer.text.documents import Document, cut, read_documents

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello you"}]


def read(tmp_path, content: str | bytes, tokenizer, name: str = "text.jsonl") -> list[Document]:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_documents(path, "--text", tokenizer)


def test_plain_text_is_one_document_without_an_answer(tmp_path, bpe):
    text = "one line\nand another\n"
    (document,) = read(tmp_path, text, bpe, "text.txt")
    assert document == Document(bpe.encode(text), len(bpe.encode(text)))


def test_lines_are_texts_or_conversations(tmp_path, bpe):
    lines = [json.dumps({"text": "first text"}), "", json.dumps({"messages": MESSAGES})]
    text, chat = read(tmp_path, "\n".join(lines), bpe)
    assert text.answer == len(text.token_ids)
    assert chat.token_ids[: chat.answer] == bpe.encode_chat(MESSAGES[:1])
    assert bpe.decode(chat.token_ids[chat.answer :]) == "hello you"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"text": "fine enough"}\n{"prompt": "x"}', 'line 2 has neither "text" nor "messages"'),
        ('{"messages": []}', "line 1 has neither"),
        ('{"messages": [{"role": "user"}]}', "line 1 has neither"),
        ("[1]", "line 1 has neither"),
        ("{", "line 1 is not JSON"),
        ("\n\n", "nothing to predict"),
        ('{"text": ""}', "nothing to predict"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, bpe, content, complaint):
    with pytest.raises(UserError) as caught:
        read(tmp_path, content, bpe)
    assert complaint in str(caught.value) and str(tmp_path) in str(caught.value)


def test_missing_file_is_named(tmp_path, bpe):
    with pytest.raises(UserError, match="cannot read --text .*none.txt: No such file"):
        read_documents(tmp_path / "none.txt", "--text", bpe)


@pytest.mark.parametrize(("size", "length"), [(10, 4), (11, 4), (4, 4), (5, 4), (2, 2), (7, 2)])
def test_every_token_but_the_first_is_predicted_once(size, length):
    parts = cut([Document(list(range(size)), 6)], length)
    assert all(1 < len(part.token_ids) <= length for part in parts)
    assert [token for part in parts for token in part.token_ids[1:]] == list(range(1, size))
    answers = [token for part in parts for place, token in enumerate(part.token_ids) if place >= max(1, part.answer)]
    assert answers == list(range(6, size))


def test_steps_hold_every_text_once_in_order_with_blocks_of_its_own():
    texts = [list(range(length)) for length in (200, 300, 13, 600, 512, 5)]
    steps = TextBatches.split(texts, block_size=16)
    assert [[len(text) for text in step] for step in steps.steps] == [[200, 300], [13], [600], [512], [5]]
    for plan, step in zip(steps.plans(), steps.steps, strict=True):
        assert plan.num_tokens <= STEP_TOKENS or len(step) == 1
        blocks = [block for entry in plan.entries for block in entry.new_blocks]
        assert sorted(blocks) == list(range(len(blocks))) and len(blocks) <= steps.num_blocks
        for entry, text in zip(plan.entries, step, strict=True):
            assert entry.num_tokens == len(text) <= 16 * len(entry.new_blocks)
    assert steps.num_blocks == 38


def test_rows_are_those_before_the_tokens_they_predict():
    steps = TextBatches.split([[7, 8, 9], [4, 5]], block_size=16)
    assert list(steps.predictions()) == [([0, 1, 3], [8, 9, 5])]
