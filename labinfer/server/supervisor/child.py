"""child: runs a program that gets SIGTERM as soon as its parent process dies, however that dies (Linux, ``prctl(2)``).

The file imports nothing of labinfer, so that it takes only milliseconds. Usage: ``python -E -S child.py PARENT PROGRAM …`` where
PARENT is the parent's process id.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
STANDARD_ERROR = 2

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # the parent died before this process called prctl
        raise SystemExit(2)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        with contextlib.suppress(
            OSError
        ):  # a log that cannot be written is lost, as in labinfer/base/standard_error.py
            os.write(STANDARD_ERROR, f"labinfer: error: cannot start {sys.argv[2]}: {error.strerror}\n".encode())
        raise SystemExit(2) from None
