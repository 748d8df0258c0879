"""Parent process of a program, such as an inference server; stops all its processes when it ends.

It also stops them when its own parent ends. A program's children may have changed their group,
their session and, by setting a process title, the environment that others can read. Such
children could not be found after their parent has exited, so this process adopts them
(PR_SET_CHILD_SUBREAPER).

Standard library only: this file runs as a script,
``process_guard.py REPORT_FD LIMIT_S FOLDER -- COMMAND``. A byte on its standard input requests an
orderly stop of the program within LIMIT_S seconds; end of input stops it at once. The guard reports
the program's process id, and its wait status once all its processes have ended, and removes FOLDER.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36


def watch(command: list[str], report_fd: int, limit_s: float, folder: str) -> None:
    """Run the program and stop all of its processes when it or the guard's parent ends.

    Args:
        command: Program and arguments.
        report_fd: Descriptor for the process id and the wait status, one decimal line each.
        limit_s: Seconds for an orderly stop.
        folder: Folder to remove at the end; '' for none.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_fd = _wake_at_childs_end()
    try:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        _report(report_fd, 0)  # there is no process
        _end(report_fd, 127 << 8, folder)
        return
    _report(report_fd, program.pid)
    # Only the program keeps the output pipe open, so that its reader sees end of file.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    status = _until_it_ends(program.pid, wake_fd, limit_s)
    while (remaining := _descendants(os.getpid())) or status is None:
        for pid in remaining:
            _signal(pid, signal.SIGKILL)
        ended = _reap(program.pid)
        status = ended if status is None else status
        time.sleep(0.005)
    _end(report_fd, status, folder)


def _end(report_fd: int, status: int, folder: str) -> None:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    _report(report_fd, status)


def _report(report_fd: int, number: int) -> None:
    try:
        os.write(report_fd, b"%d\n" % number)
    except OSError:
        return  # the parent has exited, and the guard stops the program


def _wake_at_childs_end() -> int:
    """Return a descriptor that becomes readable when a child has ended.

    Signals to the parent's group must not end the guard: only the parent's request or its end stops
    the program. The guard has handlers that do nothing, because the program would inherit ignored
    signals.
    """
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    return read_fd


def _until_it_ends(program_pid: int, wake_fd: int, limit_s: float) -> int | None:
    """Wait for the program; return its wait status, or None when it must be killed."""
    watched = [0, wake_fd]
    deadline: float | None = None
    while True:
        status = _reap(program_pid)
        if status is not None:
            return status
        remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if remaining_s == 0.0:
            return None
        ready, _, _ = select.select(watched, [], [], remaining_s)
        if wake_fd in ready:
            os.read(wake_fd, 4096)
        if 0 in ready:
            if not os.read(0, 1):
                return None  # the parent has exited
            _signal(program_pid, signal.SIGTERM)
            deadline = time.monotonic() + limit_s


def _reap(program_pid: int) -> int | None:
    """Reap all ended children, adopted ones too; return the program's status if it has ended."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == program_pid:
            found = status


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue  # the process has ended
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    pending = [root]
    while pending:
        born = children.get(pending.pop(), [])
        found += born
        pending += born
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # the process has ended, or has changed its user


if __name__ == "__main__":
    _fd, _limit_s, _folder, _separator, *_command = sys.argv[1:]
    os.set_inheritable(int(_fd), False)
    watch(_command, int(_fd), float(_limit_s), _folder)
