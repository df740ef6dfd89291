"""``python -m labinfer`` is the same program as ``launch.py`` and the ``labinfer`` command."""

from labinfer.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
