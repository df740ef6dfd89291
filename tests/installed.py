"""run: commands as somebody without this checkout would run them, for tests of installed packages."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence


def run(command: Sequence[object], timeout: float = 3000, **env: str) -> str:
    """Output of a command without this checkout on its path.

    Raises:
        AssertionError: the command failed.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    words = [str(word) for word in command]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, env=variables
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-4000:]}"
    return done.stdout
