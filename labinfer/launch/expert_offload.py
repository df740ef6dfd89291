"""offload_experts: keeps MoE experts that do not fit in memory in a file (``--expert-offload``)."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable
from pathlib import Path

from labinfer.functions.expert_offload import ExpertOffload, needs_compiled_experts
from labinfer.functions.provider import Provider
from labinfer.launch.layout.layout import Layout
from labinfer.launch.tune import cache_folder
from labinfer.models.layers.context import StageContext


def offload_experts(
    context: StageContext, layout: Layout, providers: Iterable[Provider]
) -> tuple[StageContext, ExpertOffload | None]:
    """Stage context with functions that read experts from a file, and the ``ExpertOffload``; None in its place if all experts are in memory.

    Raises:
        UserError: no provider supports expert offload.
    """
    if not layout.expert_memory:
        return context, None
    folder = cache_folder() or Path(tempfile.gettempdir())
    offers = (provider.expert_offload(layout.expert_memory, folder) for provider in providers)
    if (offload := next(filter(None, offers), None)) is None:
        raise needs_compiled_experts()
    return dataclasses.replace(context, functions=offload.offload(context.functions)), offload
