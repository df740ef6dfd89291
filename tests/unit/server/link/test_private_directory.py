"""Directories of killed runs are removed by the next one, and no others."""

from __future__ import annotations

import os
import tempfile

from labinfer.server.link.private_directory import PREFIX, YOUNG_SECONDS, private_directory


def test_leftovers_of_killed_runs_are_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("dead", "young", "other")
    dead, young, other = (tmp_path / (PREFIX + name if name != "other" else name) for name in names)
    for path in (dead, young, other):
        path.mkdir()
        (path / "engine.socket").touch()
    with private_directory() as living:
        (living / "engine.socket").touch()
        for path in (dead, living, other):
            os.utime(path, (0, os.stat(path).st_mtime - 2 * YOUNG_SECONDS))
        with private_directory() as new:
            assert set(tmp_path.iterdir()) == {living, new, young, other}
            assert (living / "engine.socket").exists()
    assert set(tmp_path.iterdir()) == {young, other}
