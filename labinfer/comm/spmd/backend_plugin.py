"""Message for a plugin of torch (such as torch_npu) that fails to load. ``import torch`` loads all installed plugins; torch is not imported here."""

from __future__ import annotations

import re

FAILURE = re.compile(r"Failed to load the backend extension: (\S+?)\. ")
"""Start of torch's error text for a plugin that fails to load. The error's ``__cause__`` is the plugin's own error."""


def explain_backend_plugin(error: BaseException | None) -> str:
    """Message for an error of ``import torch`` that a plugin caused; empty for other errors."""
    while error is not None:
        if isinstance(error, RuntimeError) and (match := FAILURE.match(str(error))):
            cause = " ".join(str(error.__cause__).split())
            return (
                f"torch's plugin {match[1]} does not load: {cause:.300}; set up its environment (Ascend: source set_env.sh of CANN), or set "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run without its devices"
            )
        error = error.__cause__ or error.__context__
    return ""
