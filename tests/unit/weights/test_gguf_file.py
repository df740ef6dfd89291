"""GgufFile: what files say, and what is refused; the files are written by gguf-py, or by hand where they are broken."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from labinfer.base.errors import UserError
from labinfer.weights.gguf import file as gguf_file
from labinfer.weights.gguf import header as gguf_header
from labinfer.weights.gguf.file import GgufFile, is_gguf, split_paths


def write(path, **writer_options) -> None:
    """A file with a value of every kind and two tensors."""
    writer = gguf.GGUFWriter(path, "llama", **writer_options)
    writer.add_uint32("a.size", 7)
    writer.add_int64("a.negative", -3)
    writer.add_float32("a.share", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "größe")
    writer.add_array("a.texts", ["", "é", "x" * 3000, "<|im_end|>"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.bytes", bytes([1, 255]))
    writer.add_tensor("t.weight", np.arange(6 * 64, dtype=np.float32).reshape(6, 64))
    codes = gguf.quants.quantize(np.ones((2, 3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("e.weight", codes, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "a.gguf")
    return tmp_path / "a.gguf"


def test_metadata_is_read(path, monkeypatch):
    for chunk in (1 << 20, 1, 100):  # texts may lie across two reads
        monkeypatch.setattr(gguf_header, "CHUNK", chunk)
        file = GgufFile(path)
        assert file.get("general.architecture", str) == "llama"
        assert (file.get("a.size", int), file.get("a.negative", int), file.get("a.share", float)) == (7, -3, 0.5)
        assert file.get("a.size", float) == 7.0 and file.get("a.flag", bool) and file.get("a.text", str) == "größe"
        assert file.texts("a.texts") == ["", "é", "x" * 3000, "<|im_end|>"]
        assert file.numbers("a.numbers") == [1, -2, 3] and file.numbers("a.size") == [7]
        assert file.get("missing", int, 5) == 5 and file.texts("missing") == file.numbers("missing") == []
        assert "a.flag" in file and "missing" not in file


def test_tensors_have_their_places(path):
    tensors = GgufFile(path).tensors
    plain, coded = tensors["t.weight"], tensors["e.weight"]
    assert plain.shape == (6, 64) and plain.type.name == "F32" and plain.row_bytes == 256
    assert coded.shape == (2, 3, 64) and coded.type.name == "Q8_0" and coded.row_bytes == 68
    plain.file.seek(plain.position)
    assert np.array_equal(np.frombuffer(plain.file.read(6 * 256), np.float32), np.arange(6 * 64))


@pytest.mark.parametrize("kind", [str, bool, float])
def test_value_of_another_kind_is_refused(path, kind):
    key = {str: "a.size", bool: "a.text", float: "a.flag"}[kind]
    with pytest.raises(UserError, match=f"{key} should be {kind.__name__}, not"):
        GgufFile(path).get(key, kind)
    with pytest.raises(UserError, match="should be a list of strings, not an array of 3"):
        GgufFile(path).texts("a.numbers")
    with pytest.raises(UserError, match="should be numbers, not an array of 4"):
        GgufFile(path).numbers("a.texts")
    with pytest.raises(UserError, match="should be bytes, not an array of 3"):
        GgufFile(path).raw_bytes("a.numbers")


def test_bytes_and_numbers_are_bounded(path, monkeypatch):
    assert GgufFile(path).raw_bytes("a.bytes") == bytes([1, 255])
    monkeypatch.setattr("labinfer.weights.gguf.file.MAX_NUMBERS", 2)
    with pytest.raises(UserError, match="a.numbers has 3 numbers; 2 are supported"):
        GgufFile(path).numbers("a.numbers")


def test_split_files_are_read_as_one(tmp_path):
    write(tmp_path / "m.gguf", split_max_tensors=1)
    first, second = sorted(tmp_path.glob("*.gguf"))
    assert split_paths(first) == [first, second]
    file = GgufFile(first)
    assert {name: tensor.path for name, tensor in file.tensors.items()} == {"t.weight": first, "e.weight": second}
    with pytest.raises(UserError, match=r"part 2 of a model of 2 files; give the first, m-00001-of-00002.gguf"):
        GgufFile(second)
    second.unlink()
    with pytest.raises(UserError, match="m-00002-of-00002.gguf is missing"):
        GgufFile(first)
    first.rename(tmp_path / "other.gguf")
    with pytest.raises(UserError, match="one of 2 files"):
        GgufFile(tmp_path / "other.gguf")


def write_parts(directory, name: str, architecture: str = "llama", count: int = 2) -> list:
    """A model in as many files, and their paths."""
    writer = gguf.GGUFWriter(directory / f"{name}.gguf", architecture, split_max_tensors=1)
    for number in range(count):
        writer.add_tensor(f"{name}.{number}", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(directory.glob(f"{name}-*.gguf"))


def test_part_of_another_model_is_refused(tmp_path):
    own, three = write_parts(tmp_path, "own"), write_parts(tmp_path, "three", count=3)
    good = own[1].read_bytes()
    for part, complaint in (
        (
            three[1],
            r"own-00002-of-00002\.gguf is not part 2 of 2 of own-00001-of-00002\.gguf: its split\.count is 3, not 2",
        ),
        (own[0], r"is not part 2 of 2 of .*: its split\.no is 0, not 1"),
    ):
        own[1].write_bytes(part.read_bytes())
        with pytest.raises(UserError, match=complaint) as refusal:
            GgufFile(own[0])
        assert "\n" not in str(refusal.value)
    own[1].write_bytes(good)
    assert len(GgufFile(own[0]).tensors) == 2


def test_parts_of_another_architecture_or_with_fewer_tensors_are_refused(tmp_path):
    """Files of converters that repeat the metadata in each part, and a file that lost tensors."""
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]

    def write_part(number: int, architecture: str, count: int) -> None:
        writer = gguf.GGUFWriter(paths[number], architecture)
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", number)
        writer.add_int32("split.tensors.count", count)
        writer.add_tensor(f"t.{number}", np.zeros((2, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write_part(0, "llama", 2)
    write_part(1, "qwen2", 2)
    with pytest.raises(UserError, match="its general.architecture is 'qwen2', not 'llama'"):
        GgufFile(paths[0])
    write_part(1, "llama", 3)
    with pytest.raises(UserError, match="its split.tensors.count is 3, not 2"):
        GgufFile(paths[0])
    for number in (0, 1):
        write_part(number, "llama", 3)
    with pytest.raises(UserError, match="have 2 tensors, but should have 3"):
        GgufFile(paths[0])


def test_every_shortened_file_is_refused(path):
    data, last = path.read_bytes(), GgufFile(path).tensors["e.weight"]
    end = last.position + 6 * last.row_bytes  # what follows fills up a block of the file
    for size in [*range(200), *range(200, end, 97), end - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match=r"a\.gguf") as refusal:
            GgufFile(path)
        assert "\n" not in str(refusal.value)


def header(num_tensors: int = 0, num_keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(*dimensions: int, number: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + shape + struct.pack("<IQ", number, offset)


HUGE = 1 << 62
BROKEN = {
    "no magic": (b"GGML" + header()[4:], "does not begin with GGUF"),
    "version 1": (header(version=1), "has version 1; only versions 2 and 3"),
    "big-endian": (header(version=0x03000000), "is big-endian"),
    "keys without end": (header(num_keys=HUGE), "4611686018427387904 keys; the limit"),
    "tensors without end": (header(num_tensors=HUGE), "tensors; the limit"),
    "key without end": (header(num_keys=1, rest=struct.pack("<Q", HUGE)), "the limit is 65536"),
    "kind": (header(num_keys=1, rest=text(b"k") + struct.pack("<I", 13)), "of an unknown kind, 13"),
    "array of arrays": (header(num_keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "an array of kind 9"),
    "numbers without end": (header(num_keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 10, HUGE)), "too early"),
    "texts without end": (header(num_keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, HUGE)), "too early"),
    "long text inside": (
        header(num_keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", HUGE) + bytes(9)),
        "too early",
    ),
    "key twice": (header(num_keys=2, rest=2 * (text(b"k") + struct.pack("<IB", 0, 1))), "'k' is in its metadata twice"),
    "alignment": (header(num_keys=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0)), "alignment is 0"),
    "dimensions": (header(num_tensors=1, rest=tensor(1, 1, 1, 1, 1)), "has 5 dimensions"),
    "no numbers": (header(num_tensors=1, rest=tensor(32, 0)), r"has shape \[0, 32\]"),
    "large": (header(num_tensors=1, rest=tensor(32, HUGE)), "has shape"),
    "beyond the end": (header(num_tensors=1, rest=tensor(1 << 47, 1 << 47)), "ends before tensor 't'"),
    "offset": (header(num_tensors=1, rest=tensor(1, offset=(1 << 64) - 1) + bytes(99)), "ends before tensor 't'"),
    "half a block": (header(num_tensors=1, rest=tensor(16, number=8)), r"type Q8_0 has shape \[16\]"),
    "type": (header(num_tensors=1, rest=tensor(256, number=9)), "is of type Q8_1, which is not supported; supported are F32"),
    "unknown type": (header(num_tensors=1, rest=tensor(256, number=99)), "is of type 99, which"),
    "lines in a name": (header(num_tensors=1, rest=tensor(1 << 20, name=b"a\nb")), r"ends before tensor 'a\\nb'"),
    "tensor twice": (header(num_tensors=2, rest=2 * tensor(1)) + bytes(99), "tensor 't' occurs twice"),
}  # fmt: skip


@pytest.mark.parametrize("data, complaint", BROKEN.values(), ids=BROKEN)
def test_broken_file_is_refused_in_one_line(tmp_path, data, complaint):
    path = tmp_path / "b.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=complaint) as refusal:
        GgufFile(path)
    assert "\n" not in str(refusal.value) and str(path) in str(refusal.value)


def test_array_that_is_too_long_is_not_read(path, monkeypatch):
    file = GgufFile(path)
    monkeypatch.setattr(gguf_file, "MAX_ARRAY", 11)
    with pytest.raises(UserError, match="a.numbers has 12 bytes; 11 are supported"):
        file.numbers("a.numbers")


def test_what_is_a_model_in_gguf(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    assert is_gguf(tmp_path / "a.gguf") and not is_gguf(tmp_path / "folder.gguf") and not is_gguf(tmp_path)
    with pytest.raises(UserError, match=r"none\.gguf is missing"):
        GgufFile(tmp_path / "none.gguf")
