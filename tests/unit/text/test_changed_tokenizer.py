"""A tokenizer whose files are replaced while it is used: whoever reads them again notices."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import labinfer
from labinfer.base.errors import UserError
from labinfer.base.structured_outputs import StructuredOutputs
from labinfer.requests.input_processor import InputProcessor
from labinfer.text.guidance import GrammarGuideMaker
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.tokenizing import PromptText

DEMO = Path(labinfer.__file__).parent / "assets" / "demo"
FORM = StructuredOutputs(regex="[a-z]{3}")


@pytest.fixture
def directory(tmp_path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def swap_tokens(directory: Path) -> bytes:
    """Let two tokens change their ids. Returns the old file."""
    path = directory / "tokenizer.json"
    before = path.read_bytes()
    values = json.loads(before)
    vocabulary = values["model"]["vocab"]
    a, b = list(vocabulary)[-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    path.write_text(json.dumps(values))
    return before


def test_process_for_long_prompts_starts_with_the_same_tokenizer_only(directory):
    inputs, text = InputProcessor(directory, required=True), [PromptText(text="red blue")]
    try:
        wanted = [inputs.tokenizer.encode("red blue")]
        os.utime(directory / "tokenizer.json")
        assert inputs.tokenizing.encode(text) == wanted
        before = swap_tokens(directory)
        assert inputs.tokenizing.encode(text) == wanted  # which runs already
        inputs.tokenizing.close()
        with pytest.raises(UserError, match=f"the tokenizer in {directory} has changed since it was loaded"):
            inputs.tokenizing.encode(text)
        (directory / "tokenizer.json").write_bytes(before)
        assert inputs.tokenizing.encode(text) == wanted
    finally:
        inputs.close()


def test_guides_and_trials_of_grammars_are_of_the_same_tokenizer_only(directory):
    inputs = InputProcessor(directory, required=True)
    tokenizer = inputs.tokenizer
    try:
        before = swap_tokens(directory)
        with pytest.raises(UserError, match="tokenizer.json has changed since it was loaded"):
            GrammarGuideMaker(lambda: tokenizer, tokenizer.vocab_size, (2,)).make(FORM)
        with pytest.raises(UserError, match="tokenizer.json has changed since it was loaded"):
            inputs._sandbox.check(FORM)
        (directory / "tokenizer.json").write_bytes(before)
        assert GrammarGuideMaker(lambda: tokenizer, tokenizer.vocab_size, (2,)).make(FORM)
        inputs._sandbox.check(FORM)
    finally:
        inputs.close()


def test_file_that_changes_while_a_tokenizer_is_read_is_noticed(directory, monkeypatch):
    open_files = Tokenizer._open

    def replace_then_open(path: Path):
        swap_tokens(path)
        return open_files(path)

    monkeypatch.setattr(Tokenizer, "_open", staticmethod(replace_then_open))
    with pytest.raises(UserError, match="tokenizer.json has changed since it was loaded"):
        Tokenizer(directory)
