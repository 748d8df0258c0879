"""Dumps the Python stacks of a process that cannot answer because C code holds its GIL.

The process registers a faulthandler for a real-time signal; the handler writes the stacks to an
anonymous file. Another process of the same user sends the signal and reads the file through /proc.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import linecache
import os
import re
import shutil
import signal
import subprocess
import time

from helmsman.api.run_state import Frame, StackTrace

_NAME = "helmsman_stacks"
_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*?)\])? .*:$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_PY_SPY_FRAME = re.compile(r"^    (\S.*) \((.*):(\d+)\)$")
_QUIET_S = 0.1
_PY_SPY_S = 5.0


@functools.cache
def offer_stacks() -> None:
    """Let other processes of this user dump the stacks of this one, where the system allows it."""
    if not hasattr(os, "memfd_create") or not hasattr(signal, "SIGRTMAX"):
        return
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    # A short write of the kernel appends, so every dump follows the one before.
    faulthandler.register(_signal_number(), file=fd, all_threads=True, chain=False)


def dump_stacks(pid: int, limit_s: float = 1.0) -> list[StackTrace]:
    """Return the stacks of a process of this machine; empty if none could be obtained.

    Uses py-spy where it is installed, which also reads a stopped process. Otherwise the process
    must have called ``offer_stacks``, and must not be stopped.

    Args:
        pid: The process, which must belong to a run of this user.
        limit_s: Longest wait in seconds for the process.
    """
    program = shutil.which("py-spy")
    if program is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [program, "dump", "--nonblocking", "--pid", str(pid)],
                capture_output=True,
                text=True,
                timeout=_PY_SPY_S,
                check=True,
            )
            if found := _parse_py_spy(done.stdout):
                return found
    path = _file_of(pid)
    if path is None:
        return []
    with contextlib.suppress(OSError):
        begin = size = os.stat(path).st_size
        os.kill(pid, _signal_number())
        deadline, changed_at = time.monotonic() + limit_s, 0.0
        while time.monotonic() < deadline:
            now = os.stat(path).st_size
            if now != size:
                size, changed_at = now, time.monotonic()
            elif changed_at and time.monotonic() > changed_at + _QUIET_S:
                break
            time.sleep(0.01)
        with open(path, "rb") as file:
            file.seek(begin)
            return parse_dump(file.read().decode(errors="replace"))
    return []


def parse_dump(text: str) -> list[StackTrace]:
    """Parse the output of faulthandler; the thread with the interpreter's lock comes first."""
    found: list[StackTrace] = []
    holder = ""
    for line in text.splitlines():
        if head := _THREAD.match(line):
            found.append(StackTrace(thread=head[3] or head[2], frames=[]))
            if head[1] == "Current thread":
                holder = found[-1].thread
        elif found and (match := _FRAME.match(line)):
            number = int(match[2]) if match[2].isdigit() else 0
            text = linecache.getline(match[1], number).strip()[:200]
            found[-1].frames.insert(0, Frame(match[1], number, match[3], text))
    return sorted(found, key=lambda each: each.thread != holder)


def _parse_py_spy(text: str) -> list[StackTrace]:
    found: list[StackTrace] = []
    for line in text.splitlines():
        if line.startswith("Thread "):
            found.append(StackTrace(thread=line.rpartition('"')[0].partition('"')[2], frames=[]))
        elif found and (match := _PY_SPY_FRAME.match(line)):
            found[-1].frames.insert(0, Frame(match[2], int(match[3]), match[1]))
    return found


def _signal_number() -> int:
    """A real-time signal that neither glibc nor common libraries use."""
    return int(signal.SIGRTMAX) - 3


def _file_of(pid: int) -> str | None:
    folder, wanted = f"/proc/{pid}/fd", f"/memfd:{_NAME} (deleted)"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(f"{folder}/{name}") == wanted:
                    return f"{folder}/{name}"
    return None
