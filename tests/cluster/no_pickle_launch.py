"""``launch.py`` in a process where pickle raises: nothing may be pickled on the wire or on disk."""

from __future__ import annotations

import pickle
import sys


def refuse(*args, **kwargs):
    raise AssertionError("pickle was used")


if __name__ == "__main__":
    # Once more after the heavy imports, for whoever bound the names early (from pickle import loads).
    import jinja2  # noqa: F401 - pickles a number as it is imported, which happens later

    import labinfer.api.llm  # noqa: F401
    from labinfer.cli.main import main

    originals = {pickle.loads, pickle.dumps, pickle.load, pickle.dump, pickle.Pickler, pickle.Unpickler}
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if hasattr(module, "__dict__") else []:
            try:
                bound = value in originals
            except Exception:  # noqa: BLE001 - odd objects compare oddly
                continue
            if bound:
                setattr(module, name, refuse)
    raise SystemExit(main())
