"""Become another program that gets SIGTERM when the process that started it dies, however it dies (Linux, ``prctl(2)``).

It runs without the package, so that it costs some milliseconds: ``python -E -S child.py PROGRAM …``.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.stderr.write(f"labinfer: error: cannot start {sys.argv[1]}: {error.strerror}\n")
        raise SystemExit(2) from None
