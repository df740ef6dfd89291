"""For all real launches: checkpoints and Transformers' answers, made once."""

from __future__ import annotations

import hashlib
import json
import tempfile
from contextlib import suppress
from pathlib import Path

import checkpoints
import pytest
import torch
import transformers
from checkpoints import FAMILIES, KINDS, make_checkpoint, mixed_prompts, transformers_greedy
from safetensors.torch import save_file

from labinfer.native.compiler import default_cache

NUM_TOKENS = 32


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    """A folder with every checkpoint, its reference logits, ``prompts.json`` and ``references.json``."""
    work = tmp_path_factory.mktemp("golden")
    (work / "prompts.json").write_text(json.dumps(mixed_prompts()))
    tokens = {}
    for kind in KINDS + FAMILIES:
        kept = keep_checkpoint(kind)
        (work / kind).symlink_to(kept)
        tokens[kind] = json.loads((kept / "reference.json").read_text())
    (work / "references.json").write_text(json.dumps(tokens))
    return work


def keep_checkpoint(kind: str) -> Path:
    """A checkpoint with Transformers' answers beside it, which stay between runs: Transformers takes long for them."""
    parts = [Path(checkpoints.__file__).read_bytes(), transformers.__version__.encode(), torch.__version__.encode()]
    digest = hashlib.blake2b(b"\0".join([*parts, str(NUM_TOKENS).encode()]), digest_size=8).hexdigest()
    folder = default_cache() / "tests" / digest
    if not (folder / kind).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            directory = Path(unfinished) / kind
            directory.mkdir()
            make_checkpoint(directory, kind)
            answers = transformers_greedy(directory, mixed_prompts(), NUM_TOKENS)
            (directory / "reference.json").write_text(json.dumps([answer["token_ids"] for answer in answers]))
            # Not model*.safetensors, so that it is no part of the checkpoint.
            logits = torch.stack([answer["logits"] for answer in answers])
            save_file({"logits": logits}, directory / "reference.safetensors")
            with suppress(OSError):  # another run was faster
                directory.rename(folder / kind)
    return folder / kind


@pytest.fixture(scope="session")
def references(work) -> dict[str, list[list[int]]]:
    """Transformers' greedy tokens, by checkpoint and prompt."""
    return json.loads((work / "references.json").read_text())


@pytest.fixture(scope="session")
def model() -> str:
    """A checkpoint for tests that need just any."""
    return str(keep_checkpoint("qwen2-tied"))
