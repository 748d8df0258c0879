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

from helmsman._process.pulse import memfds_of
from helmsman.api.run_state import Frame, StackTrace

_NAME = "helmsman_stacks"
_THREAD = re.compile(r"^(?P<holder>Current )?[Tt]hread (0x[0-9a-f]+)(?: \[(.*?)\])? .*:$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_PY_SPY_THREAD = re.compile(r'^Thread (?:.*?"(.*)")?')
_PY_SPY_FRAME = re.compile(r"^    (?P<function>\S.*) \((?P<file>.*):(?P<line>\d+)\)$")
_SIGNAL = int(getattr(signal, "SIGRTMAX", 64)) - 3
"""A real-time signal that neither glibc nor common libraries use."""
_QUIET_S = 0.1
_PY_SPY_S = 5.0


@functools.cache
def offer_stacks() -> None:
    """Let other processes of this user dump the stacks of this one, where the system allows it."""
    if not hasattr(os, "memfd_create") or not hasattr(signal, "SIGRTMAX"):
        return
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    # A short write of the kernel appends, so every dump follows the one before.
    faulthandler.register(_SIGNAL, file=fd, all_threads=True, chain=False)


def dump_stacks(pid: int, limit_s: float = 1.0) -> list[StackTrace]:
    """Return the stacks of a process of this machine; empty if none could be obtained.

    The thread with the interpreter's lock comes first. Uses py-spy where it is installed, which
    also reads a stopped process. Otherwise the process must have called ``offer_stacks``, must not
    be stopped, and has ``limit_s`` seconds. It must belong to a run of this user.
    """
    program = shutil.which("py-spy")
    if program is not None:
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            output = subprocess.check_output(
                command, stderr=subprocess.DEVNULL, text=True, timeout=_PY_SPY_S
            )
            if found := _parse(output, _PY_SPY_THREAD, _PY_SPY_FRAME):
                return found
    path = dict(memfds_of(pid)).get(_NAME)
    if path is None:
        return []
    with contextlib.suppress(OSError):
        begin = before = os.stat(path).st_size
        os.kill(pid, _SIGNAL)
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            time.sleep(_QUIET_S)
            size = os.stat(path).st_size
            if begin < size == before:
                break
            before = size
        with open(path, "rb") as file:
            file.seek(begin)
            return _parse(file.read().decode(errors="replace"), _THREAD, _FRAME)
    return []


def _parse(text: str, thread: re.Pattern[str], frame: re.Pattern[str]) -> list[StackTrace]:
    found: list[StackTrace] = []
    shown: list[Frame] = []
    for line in text.splitlines():
        if head := thread.match(line):
            names = [each for each in head.groups() if each]
            at = 0 if "holder" in head.groupdict() and head["holder"] else len(found)
            found.insert(at, StackTrace(thread=names[-1] if names else "", frames=[]))
            shown = found[at].frames
        elif found and (match := frame.match(line)):
            number = int(match["line"]) if match["line"].isdigit() else 0
            source = linecache.getline(match["file"], number).strip()[:200]
            shown.insert(0, Frame(match["file"], number, match["function"], source))
    return found
