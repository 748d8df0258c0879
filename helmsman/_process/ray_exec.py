"""Becomes a process of an embedded Ray that ignores SIGINT and dies with the script.

Usage: ``ray_exec.py PARENT COMMAND ...``. Ray itself would fork the script for this, which is not
safe with threads of native code: the child may crash or hang.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() == parent:  # else the script ended before prctl took effect
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
