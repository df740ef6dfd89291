"""Prints the exports that bring the make-believe accelerator into a shell: ``eval "$(python -m tests.fake_device npu late-copies)"``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from labinfer.native.cache_file import digest
from labinfer.native.compiler import default_cache

from .build import install
from .plugin import SWITCHES


def main() -> None:
    name, *switches = sys.argv[1:] or ["npu"]
    if unknown := set(switches) - set(SWITCHES):
        sys.exit(f"{', '.join(sorted(unknown))}: not one of {', '.join(SWITCHES)}")
    folder = default_cache() / f"fake-device-{digest(str(Path(__file__).parent))}"
    for key, value in install(folder, name, *switches).items():
        print(f"export {key}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
