"""LABInfer: distributed large-language-model inference a lab can read, change and run.

The public names are loaded on first use, so that ``labinfer --help`` does not pay for importing torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

MODULES = {
    "AsyncLLM": "server.host.async_llm",
    "Completion": "requests.outputs",
    "Delta": "requests.outputs",
    "EmbeddingOutput": "base.pooling",
    "LLM": "api.llm",
    "RequestOutput": "requests.outputs",
    "SamplingParameter": "base.sampling_params",
    "SamplingParams": "base.sampling_params",
    "StructuredOutputs": "base.structured_outputs",
    "UserError": "base.errors",
    "register": "base.registry",
}
"""Public names, and the modules that they are in."""
__all__ = [*MODULES, "__version__"]  # noqa: PLE0604 - all are strings


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'labinfer' has no attribute {name!r}")
    if name in ("AsyncLLM", "LLM"):  # before torch is imported
        from labinfer.comm.spmd.environment import shorten_openmp_spins

        shorten_openmp_spins()
    return getattr(importlib.import_module(f"labinfer.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
