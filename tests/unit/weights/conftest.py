"""Checkpoints in published formats, which several files of tests read."""

from __future__ import annotations

import pytest
from published_formats import PUBLISHED, write_published
from published_models import SHAPE
from tiny_llama import write


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """(quantised checkpoint, plain checkpoint of the same values) by name; made when they are asked for."""
    made = {}

    def make(name: str):
        if name not in made:
            directory = tmp_path_factory.mktemp("checkpoints") / name
            directory.mkdir()
            write(directory, **SHAPE)
            write_published(directory, directory.parent / "twin", PUBLISHED[name])
            made[name] = directory, directory.parent / "twin"
        return made[name]

    return make
