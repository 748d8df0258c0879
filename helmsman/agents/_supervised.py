"""Supervisor of an agent's program: ``python _supervised.py MAX_MEMORY COMMAND...``.

It adopts every process that the program leaves behind, and ends all of them before it exits: when
the program has exited, on SIGTERM, and when the script that started it has exited.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_FIND_S = 0.01


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _end_all() -> None:
    """Kill all descendants: those of a killed process become children of this one."""
    while True:
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                return
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_FIND_S)


def main() -> int:
    """Run the command; return its exit code, 128 plus the number of a signal."""
    max_memory, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, awake = os.pipe()
    os.set_blocking(awake, False)
    signal.set_wakeup_fd(awake)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)

    def limit() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if max_memory:
            resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))

    try:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=limit)
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error}", flush=True)
        return 127
    code: int | None = None
    while code is None:
        # Standard input is a pipe from the script: it ends when the script has exited.
        ready, _, _ = select.select([wake, 0], [], [])
        if wake in ready and signal.SIGTERM in os.read(wake, 4096):
            break
        if 0 in ready and not os.read(0, 1):
            break
        code = program.poll()
    os.close(1)
    os.close(2)
    _end_all()
    return 143 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
