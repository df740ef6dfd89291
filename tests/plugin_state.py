"""Undo what plugins add to the process that loads them, which runs several tests."""

from __future__ import annotations

from labinfer.base.plugins import Plugins
from labinfer.base.registry import REGISTRY


def forget_plugins(plugins: Plugins) -> None:
    """Remove the parts that ``plugins`` registered, and the plugins themselves."""
    for source in plugins.loaded:
        for kind, name in REGISTRY.added_by(source.name):
            del REGISTRY._entries[kind][name]
    plugins.loaded.clear()
