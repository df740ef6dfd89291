"""offload_experts: experts of a mixture in a file, as far as they have no room in memory (``--expert-offload``)."""

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
    """The context with functions that keep experts in a file, and their offload; None if all experts stay in memory.

    Raises:
        UserError: no provider can keep its experts in a file.
    """
    if not layout.expert_memory:
        return context, None
    folder = cache_folder() or Path(tempfile.gettempdir())
    offers = (provider.expert_offload(layout.expert_memory, folder) for provider in providers)
    if (offload := next(filter(None, offers), None)) is None:
        raise needs_compiled_experts()
    return dataclasses.replace(context, functions=offload.offload(context.functions)), offload
