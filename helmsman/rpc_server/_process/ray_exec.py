"""Stands where a script starts a process of its embedded Ray, and becomes it.

Run as ``python -I -S ray_exec.py PARENT COMMAND ...``. Ray forks the script to change two things of such a process before it
runs: it is deaf to SIGINT, and dies with the script. Done here, the script has only to spawn. To fork a process with threads of
native code is not safe: what their libraries do in the child has crashed it, and has left it waiting for threads that are not
there, so that the cluster never came up.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Entry point."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() == parent:  # else it has died before it could be told
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
