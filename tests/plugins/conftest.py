"""Plugins of ``examples/plugins`` inside the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from launchers import ROOT
from plugin_state import forget_plugins

from labinfer.base.plugins import Plugins, find_plugin


@pytest.fixture
def load_example() -> Iterator[Callable[[str], None]]:
    """Loads ``examples/plugins/NAME.py`` for one test."""
    loaded = Plugins()
    yield lambda name: loaded.load([find_plugin(str(ROOT / f"examples/plugins/{name}.py"))])
    forget_plugins(loaded)
