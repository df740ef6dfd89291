"""Counts of the structure, on a small package made for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools/structure_counts.py"
RUN = "".join(f"    total += {name} * step\n" for name in "abcdef")
FILES = {
    "__init__.py": "",
    "base/__init__.py": "",
    "base/config.py": "class Options:\n    block_size: int = 16\n    other: int = 1\n",
    "engine/__init__.py": "",
    "engine/blocks.py": "class Blocks:\n    def __init__(self, block_size):\n        self.block_size = block_size\n"
    "    def room(self):\n        return self.block_size\n",
    "engine/first.py": f"from labinfer.engine import second\n\ndef count(total, step):\n{RUN}",
    "engine/second.py": f"def total(total, step):\n{RUN}\n    from labinfer.engine.first import count\n",
    "engine/draft_model.py": "def draft(options):\n    return options.block_size\n",
    "comm/__init__.py": "",
    "comm/wire.py": "from labinfer.engine.first import count\n",
    "planner/plan.py": "def plan(block_size): ...\n",
}


@pytest.fixture
def counts(tmp_path, monkeypatch):
    """The script as a module, over a package of its own."""
    spec = importlib.util.spec_from_file_location("structure_counts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in FILES.items():
        path = tmp_path / "labinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "labinfer")
    module.files = sorted((tmp_path / "labinfer").rglob("*.py"))
    return module


def test_circles_are_found_through_imports_in_functions(counts):
    graph = counts.import_graph(counts.files)
    assert [counts.short(path) for path in counts.in_circles(graph)] == ["engine/first.py", "engine/second.py"]


def test_both_places_of_a_repeated_run_are_named(counts):
    assert counts.duplicated_places(counts.files) == ["engine/first.py:4", "engine/second.py:2"]


def test_option_is_followed_by_scope_without_own_attributes_and_the_planner(counts):
    places = counts.option_places(counts.files, "block_size")
    assert places == ["base/config.py:Options", "engine/blocks.py:Blocks.__init__", "engine/draft_model.py:draft"]


def test_files_of_an_extension_are_no_core(counts):
    names = {counts.extension(path) for path in counts.files if path.name in ("draft_model.py", "first.py")}
    assert names == {"speculation", ""}
