"""What a job's answers depend on, by content and not by name."""

from __future__ import annotations

import pytest

from labinfer.api.batch import fingerprint
from labinfer.api.batch.fingerprint import input_fingerprint, options_fingerprint
from labinfer.base.config import EngineOptions
from labinfer.base.sampling_params import SamplingParams


@pytest.mark.parametrize("chunk_bytes", [1, 3, 1 << 20])
def test_blank_lines_of_an_input_are_not_counted(chunk_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "in.jsonl"
    for text, num_lines in ((b"", 0), (b"\n \r\n\n", 0), (b"{}\n\n  {} \n \t\n{}", 3), (b"{}\n", 1)):
        path.write_bytes(text)
        found, count = input_fingerprint(str(path))
        assert (found["bytes"], count) == (len(text), num_lines)


def test_response_template_is_known_by_its_content(tmp_path):
    prints = []
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (path := tmp_path / name).write_text(text)
        options = EngineOptions.from_flat({"response_template": str(path)})
        prints.append(options_fingerprint(options, SamplingParams()))
    assert prints[0] == prints[1] != prints[2]


def test_quantization_of_all_stages_is_written_as_ever():
    def written(quantization: str) -> object:
        options = EngineOptions.from_flat({"quantization": quantization})
        return options_fingerprint(options, SamplingParams())["--quantization"]

    assert [written(value) for value in ("auto", "int8", "none,int8")] == ["auto", "int8", "none,int8"]
