#!/usr/bin/env python
"""Every rank starts here: alone, or under torchrun, mpirun or srun. See ``launch.py --help``."""

from labinfer.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
