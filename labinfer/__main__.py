"""``python -m labinfer`` is the same program as ``launch.py`` and the ``labinfer`` command."""

from labinfer.cli.main import run_program

if __name__ == "__main__":
    run_program()
