"""Fingerprints of a job's options and input, by which ``--resume`` detects changes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from labinfer.base.config import EngineOptions
from labinfer.base.option_fields import join
from labinfer.base.plugins import PLUGINS
from labinfer.base.sampling_params import SamplingParams, sampling_parameters
from labinfer.launch.fingerprint import ANSWER_OPTIONS

CHUNK_BYTES = 1 << 22


def options_fingerprint(options: EngineOptions, sampling: SamplingParams) -> dict[str, Any]:
    """Values of the options that affect answers, by flag, with a digest in place of a file. Options of the tokenizer are left out,
    as the model's ``Identity`` includes the tokenizer."""
    chosen = {
        name: getattr(getattr(options, section), name) for section, names in ANSWER_OPTIONS.items() for name in names
    }
    files = {name: getattr(options.model, name) for name in ("response_template", "chat_template")}
    for name, path in files.items():
        if os.path.isfile(path):
            files[name] = hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    chosen["quantization"] = join(chosen["quantization"])  # format in journals of earlier versions
    if chosen["reranker"] == "auto":
        del chosen["reranker"]  # journals of earlier versions lack this option
    if PLUGINS.loaded:
        chosen["plugin"] = ", ".join(PLUGINS.identities())
    if options.model.is_reproducible:
        chosen["reproducible"] = options.model.reproducible
    values = chosen | files | msgspec.to_builtins(sampling)
    processors = values["logits_processors"]
    values |= {name: processors.pop(name) for name in sampling_parameters().keys() & processors.keys()}
    del values["speculate"]  # this option does not affect answers
    return {
        f"--{name.replace('_', '-')}": list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
    }


def input_fingerprint(path: str) -> tuple[dict[str, Any], int | None]:
    """Fingerprint of an input file (its size and digest), and its number of non-blank lines; ({}, None) if it is not a
    regular file.

    Raises:
        OSError: the file cannot be read.
    """
    if not os.path.isfile(path):
        return {}, None
    digest, num_bytes, num_lines, has_text = hashlib.blake2b(digest_size=16), 0, 0, False
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
            *ended, last = chunk.split(b"\n")
            for line in ended:
                num_lines += has_text or not _is_blank(line)
                has_text = False
            has_text = has_text or not _is_blank(last)
    return {"bytes": num_bytes, "digest": digest.hexdigest()}, num_lines + has_text


def _is_blank(line: bytes) -> bool:
    return not line or line.isspace()
