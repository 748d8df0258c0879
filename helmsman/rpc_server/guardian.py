"""The end of a worker's family: what it started, directly or through its children, goes with it.

A family is found by three marks, since a child can shed each of them alone: its descent (walked while the worker lives), the
worker's process group or session, and the worker's tag in the environment that a new program inherits. Standard library only:
this file also runs as a script of its own (``python -I -S guardian.py ...``), beside a worker whose parent is not ours (a Ray
actor), so that the family's end does not depend on the worker's, the driver's or Ray's health.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

TAG_VARIABLE = "HELMSMAN_WORKER_TAG"
"""Environment variable by which a worker's descendants are recognised; its value is unique per worker process."""

_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info of 64 bytes), Linux 6.13
_PIDFD_INFO_EXIT = 1 << 3  # Linux 6.15


class Process(NamedTuple):
    """One row of the process table."""

    pid: int
    parent: int
    group: int
    session: int
    state: str


def process_table() -> dict[int, Process]:
    """All processes that can be seen; empty where there is no /proc."""
    table = {}
    for entry in _list("/proc"):
        if entry.isdigit() and (row := _process(int(entry))) is not None:
            table[row.pid] = row
    return table


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), fields[0].decode())


def _has_tag(pid: int, tag: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return tag in file.read().split(b"\0")
    except OSError:
        return False


def descendants(root: int, table: dict[int, Process]) -> set[int]:
    """Pids below ``root`` in the process tree, without it."""
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.parent, []).append(row.pid)
    found: set[int] = set()
    pending = [root]
    while pending:
        for child in children.get(pending.pop(), []):
            if child not in found:
                found.add(child)
                pending.append(child)
    return found


def family(worker_pid: int, tag: str, known: Iterable[int] = ()) -> set[int]:
    """Living processes of a worker's family, without the worker and without the caller.

    ``known`` are pids seen before as descendants of the worker; they count only while they still carry one of its marks.
    """
    table = process_table()
    mark = f"{TAG_VARIABLE}={tag}".encode()
    members = descendants(worker_pid, table)
    for row in table.values():
        if worker_pid in (row.group, row.session) or (row.pid not in members and _has_tag(row.pid, mark)):
            members.add(row.pid)
    for pid in list(members):
        members |= descendants(pid, table)
    return {pid for pid in members if pid not in (worker_pid, os.getpid()) and table[pid].state != "Z"}


def end_family(worker_pid: int, tag: str, *, grace_s: float = 0.0, limit_s: float = 5.0) -> set[int]:
    """Kill a worker's family, after SIGTERM and ``grace_s`` seconds when that is not 0; returns who is left after
    ``limit_s``."""
    deadline = time.monotonic() + limit_s
    if grace_s and (members := family(worker_pid, tag)):
        _signal_all(members, signal.SIGTERM)
        wait_until(lambda: not family(worker_pid, tag), grace_s)
    while members := family(worker_pid, tag):
        _signal_all(members, signal.SIGKILL)
        if time.monotonic() > deadline:
            return members
        time.sleep(0.01)
    return set()


def _signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or it has changed its user: not ours to signal


def wait_until(condition: Callable[[], bool], limit_s: float, interval_s: float = 0.01) -> bool:
    """Poll ``condition`` until it holds or ``limit_s`` seconds have passed; returns whether it held."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True


def exit_status_of(pidfd: int) -> int | None:
    """The wait status of a process that has ended and is not our child, where the kernel tells (Linux 6.15); None elsewhere."""
    info = bytearray(64)
    struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask = struct.unpack_from("Q", info, 0)[0]
    return int(struct.unpack_from("i", info, 60)[0]) if mask & _PIDFD_INFO_EXIT else None


def split_status(status: int) -> tuple[int | None, int | None]:
    """(exit code, signal) of a wait status; one of them is None."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def record_path(log_path: str) -> str:
    """Where the end of the worker with this log is recorded."""
    return f"{log_path}.exit"


def read_record(log_path: str) -> dict[str, int | None] | None:
    """What the guardian recorded of a worker's end: {"exit_code", "exit_signal"}; None while there is nothing."""
    try:
        with open(record_path(log_path)) as file:
            return dict(json.load(file))
    except (OSError, ValueError):
        return None


def watch(worker_pid: int, tag: str, log_path: str) -> None:
    """Wait for a process to end, record how, and end its family. The guardian's whole life."""
    try:
        pidfd = os.pidfd_open(worker_pid)
    except ProcessLookupError:
        status = None
    else:
        select.select([pidfd], [], [])
        status = exit_status_of(pidfd)
    code, number = split_status(status) if status is not None else (None, None)
    temporary = f"{record_path(log_path)}.{os.getpid()}"
    try:
        with open(temporary, "w") as file:
            json.dump({"exit_code": code, "exit_signal": number}, file)
        os.replace(temporary, record_path(log_path))
    except OSError as error:  # the log folder has gone; the family must end all the same
        print(f"guardian of {worker_pid}: no record at {log_path}: {error}", file=sys.stderr)
    end_family(worker_pid, tag)


def spawn_guardian(tag: str, log_path: str) -> None:
    """Start a guardian for this process; it outlives us by the moment it needs."""
    import subprocess

    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), tag, log_path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={},
        close_fds=True,
    )


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    watch(int(sys.argv[1]), sys.argv[2], sys.argv[3])
