"""Kinds of model files: a directory, and a file by the ending of its name, also one that a plugin registers."""

from __future__ import annotations

import json

import pytest

from labinfer.base.errors import UserError
from labinfer.weights.gguf.model import GgufModel
from labinfer.weights.hugging_face.directory import HuggingFaceDirectory
from labinfer.weights.model_files import ModelFiles, open_model
from labinfer.weights.resolve import find_directory


class OneFile(ModelFiles):
    def config(self):
        return {"architectures": [self.path.stem]}


def test_kind_of_files_is_chosen_by_the_ending_of_a_file(tmp_path, add_part):
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "a.one").write_bytes(b"")
    for name, kind in (("a.gguf", GgufModel), ("folder.gguf", HuggingFaceDirectory), ("a.one", HuggingFaceDirectory)):
        assert type(open_model(tmp_path / name)) is kind
    with pytest.raises(UserError, match="or a .gguf file"):
        find_directory(str(tmp_path / "a.one"), "")
    add_part("model_files", "one", OneFile)
    assert open_model(tmp_path / "a.one").config() == {"architectures": ["a"]}
    assert find_directory(str(tmp_path / "a.one"), "")[0] == tmp_path / "a.one"
    (tmp_path / "folder.gguf").rmdir()
    with pytest.raises(UserError, match=f"has no config.json, but ONE files; .*{tmp_path}/a.one"):
        open_model(tmp_path).config()


@pytest.mark.parametrize(
    ("values", "of"), [({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}, " of 'Qwen/Qwen3-0.6B'"), ({}, "")]
)
def test_lora_adapter_is_named(values, of, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"^{tmp_path} is a LoRA adapter{of} .*merge it into its model by PEFT"):
        open_model(tmp_path).config()
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert open_model(tmp_path).config() == {"a": 1}
