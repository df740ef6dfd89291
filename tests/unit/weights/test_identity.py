"""The identity of a model: what it notices, and what it takes for the same."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from labinfer.base.errors import UserError
from labinfer.weights import identity
from labinfer.weights.identity import compare, file_digest, identify, merge, model_files, setting_files, stamp
from labinfer.weights.resolve import resolve_model


@pytest.fixture
def directory(tmp_path) -> Path:
    return Path(shutil.copytree(resolve_model("demo", "", may_download=False), tmp_path / "model"))


def all_files(directory: Path) -> dict[str, Path]:
    return model_files(directory) | setting_files(directory)


def flip(path: Path, position: int) -> None:
    """Change a byte in place."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def test_every_file_that_changes_appears_or_goes_is_named(directory):
    before = identify(all_files(directory))
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= before.keys()
    for name in before:
        path = directory / name
        content = path.read_bytes()
        flip(path, len(content) // 2)
        assert compare(before, identify(all_files(directory))).changed == [str(path)]
        path.write_bytes(content)
        assert not compare(before, identify(all_files(directory))).changed
    (template := directory / "chat_template.jinja").write_text("{{ messages }}")
    assert compare(before, identify(all_files(directory))).changed == [str(template)]
    template.unlink()
    (directory / "generation_config.json").unlink()
    changes = compare(before, identify(all_files(directory)))
    assert changes.describe() == f"{directory}/generation_config.json has changed"


def test_touched_copied_and_moved_files_are_the_same(directory, tmp_path):
    before = identify(all_files(directory))
    for path in directory.iterdir():
        os.utime(path)
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    for place in (directory, copy):
        changes = compare(before, identify(all_files(place)))
        assert not changes.changed and not changes.rewritten


@pytest.fixture
def large(tmp_path, monkeypatch) -> Path:
    """A weight file of which samples are read: small tensors between large ones."""
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1 << 16)
    monkeypatch.setattr(identity, "SAMPLE_EVERY", 1 << 16)
    sizes = [7, 100_000, 300, 1, 250_000, 64]
    save_file({f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}, path := tmp_path / "model.safetensors")
    return path


def test_samples_notice_the_header_every_tensor_and_changes_all_over_a_file(large):
    before = identify({"weights": large})
    assert before["weights"].is_sampled
    header = 8 + int.from_bytes(large.read_bytes()[:8], "little")
    _, tensors = identity._safetensors(fd := os.open(large, os.O_RDONLY), large.stat().st_size)
    os.close(fd)
    assert len(tensors) == 6
    strides = [(end - begin) // (1 + (end - begin) // identity.SAMPLE_EVERY) for begin, end in tensors]
    places = [0, 9, header - 1]
    places += [begin + stride // 2 for (begin, _), stride in zip(tensors, strides, strict=True)]
    places += [end - 1 for begin, end in tensors if end - begin <= identity.SAMPLE_BYTES]
    for position in places:
        flip(large, position)
        assert compare(before, identify({"weights": large})).changed == [str(large)], position
        flip(large, position)
    content = large.read_bytes()
    draw = random.Random(1)
    for _ in range(100):  # a run of changed bytes that is longer than the way from one sample to the next
        begin = draw.randrange(header, len(content) - (1 << 17))
        large.write_bytes(content[:begin] + draw.randbytes(1 << 17) + content[begin + (1 << 17) :])
        assert compare(before, identify({"weights": large})).changed
    large.write_bytes(content + b"\0")
    assert compare(before, identify({"weights": large})).changed


def test_sampled_file_that_was_written_to_is_told_of_but_no_untouched_one(large):
    before = identify({"weights": large})
    assert compare(before, identify({"weights": large})) == identity.Changes([], [])
    os.utime(large)
    now = identify({"weights": large})
    assert compare(before, now) == identity.Changes([], [str(large)])
    assert compare(merge([before, now]), now) == identity.Changes([], [])


@pytest.mark.parametrize(
    "header", [b"", b"\xff" * 8, (20).to_bytes(8, "little") + b"{" * 20, (1 << 40).to_bytes(8, "little")]
)
def test_broken_weight_file_has_a_digest_too_and_the_loader_says_what_is_wrong(header, large):
    size = large.stat().st_size
    large.write_bytes(header + b"x" * (size - len(header)))
    before = file_digest(large)
    assert file_digest(large) == before
    large.write_bytes(header + b"y" * (size - len(header)))
    assert file_digest(large) != before


def test_missing_file_is_one_line(tmp_path):
    for call in (stamp, file_digest):
        with pytest.raises(UserError, match="cannot be read: No such file"):
            call(tmp_path / "model.safetensors")


def test_header_that_is_nested_too_deeply_is_no_reason_to_fail(tmp_path):
    path, depth = tmp_path / "model.safetensors", 100_000
    header = b'{"a": {"shape": ' + b"[" * depth + b"]" * depth + b"}}"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(identity.WHOLE_BYTES))
    before = file_digest(path)
    flip(path, len(header) // 2)
    assert file_digest(path) != before


def test_files_that_no_answer_depends_on_may_come_and_go(directory):
    before = identify(all_files(directory))
    for name in ("report.json", "trace.json", "output.json", "output.jsonl", "preprocessor_config.json"):
        (directory / name).write_text("{}")
    assert not compare(before, identify(all_files(directory))).changed


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer.model",
        "tiktoken.model",
        "chat_template.jinja",
        "chat_template.json",
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "2_Normalize/config.json",
        "0_Transformer/sentence_bert_config.json",
        "model.safetensors.index.json",
    ],
)
def test_every_file_beside_the_weights_that_is_read_is_watched(directory, name):
    (path := directory / name).parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    before = identify(setting_files(directory))
    path.write_text("{}")
    assert compare(before, identify(setting_files(directory))).changed == [str(path)]


def test_digest_of_a_whole_file_notices_every_byte(large):
    before = identify({"weights": large}, whole=True)
    assert not before["weights"].is_sampled
    for position in range(0, large.stat().st_size, 10_007):
        flip(large, position)
        now = identify({"weights": large}, whole=True)
        assert compare(before, now).changed == [str(large)], position
        assert identity.changed_path(before, {"weights": large}) == large
        flip(large, position)
    assert identity.changed_path(before, {"weights": large}) is None  # other stamps, the same bytes
