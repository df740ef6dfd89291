#!/usr/bin/env python
"""Every rank starts here: alone, or under torchrun, mpirun or srun. See ``launch.py --help``."""

try:
    from labinfer.cli.main import run_program
except KeyboardInterrupt:  # nobody listens to signals yet
    raise SystemExit(130) from None

if __name__ == "__main__":
    run_program()
