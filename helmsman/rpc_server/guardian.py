"""The end of a worker's family: what it started, directly or through its children, goes with it.

A family is found by marks, of which a child can shed each: its descent, the worker's process group or session, and the
worker's tag in the environment that a new program inherits. A child that was forked without a new program and has left the
session bears none of them once its parent is gone. Who ends the family knows of those: the forkserver adopts them, and a Ray
worker's forks are told to its guardian.

Standard library only: this file also runs as a script of its own (``python -I -S guardian.py ...``), beside a worker whose
parent is not ours (a Ray actor), so that the family's end does not depend on the worker's, the driver's or Ray's health.
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

_TRACKERS_S = 1.0
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info of 64 bytes), Linux 6.13
_PIDFD_INFO_EXIT = 1 << 3  # Linux 6.15


class Process(NamedTuple):
    """One row of the process table."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    started: int
    """In clock ticks since the machine's boot; with the pid, the process's identity."""


Known = Callable[[dict[int, Process]], set[int]]


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
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), fields[0].decode(), int(fields[19]))


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


def family(worker_pid: int, tag: str, known: Known = lambda table: set()) -> set[int]:
    """Living processes of a worker's family, without the worker and without the caller.

    ``known`` picks from the process table those that belong to it although they bear no mark of it.
    """
    table = process_table()
    mark = f"{TAG_VARIABLE}={tag}".encode()
    members = descendants(worker_pid, table) | known(table)
    for row in table.values():
        if worker_pid in (row.group, row.session) or (row.pid not in members and _has_tag(row.pid, mark)):
            members.add(row.pid)
    for pid in list(members):
        members |= descendants(pid, table)
    return {pid for pid in members if pid not in (worker_pid, os.getpid()) and table[pid].state != "Z"}


def end_family(worker_pid: int, tag: str, known: Known = lambda table: set(), *, limit_s: float = 5.0) -> set[int]:
    """Kill a worker's family; returns who is left after ``limit_s`` seconds.

    Python's own trackers of shared memory are left a moment: they remove the names that killed processes have left, and end
    when the last of these has gone.
    """
    deadline = time.monotonic() + limit_s
    patience = time.monotonic() + min(_TRACKERS_S, limit_s / 2)
    while members := family(worker_pid, tag, known):
        now = time.monotonic()
        _signal_all((pid for pid in members if now > patience or not _is_tracker(pid)), signal.SIGKILL)
        if now > deadline:
            return members
        time.sleep(0.01)
    return set()


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


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


def exit_status_of(pid: int, pidfd: int, limit_s: float = 0.5) -> int | None:
    """The wait status of a process that has ended and is not our child; None where the kernel does not tell.

    Until its parent reaps it, the process table has the status; from then on its pidfd has it, from Linux 6.15 on.
    """
    deadline = time.monotonic() + limit_s
    while True:
        status = _status_of_zombie(pid)
        if status is not None:
            return status
        info = bytearray(64)
        struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        except ProcessLookupError:
            info = bytearray(64)  # caught in the middle of being reaped: the next look finds it reaped
        except OSError:
            return None  # a kernel that does not know the question
        if struct.unpack_from("Q", info, 0)[0] & _PIDFD_INFO_EXIT:
            return int(struct.unpack_from("i", info, 60)[0])
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def _status_of_zombie(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[49]) if fields[0] == b"Z" else None


def split_status(status: int) -> tuple[int | None, int | None]:
    """(exit code, signal) of a wait status; one of them is None."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def record_path(log_path: str) -> str:
    """Where the end of the worker with this log is recorded."""
    return f"{log_path}.exit"


def read_record(log_path: str, pid: int) -> dict[str, int | None] | None:
    """What the guardian recorded of a worker's end: {"exit_code", "exit_signal"}; None while there is nothing of this process,
    whose predecessor may have had the same log."""
    try:
        with open(record_path(log_path)) as file:
            record = dict(json.load(file))
    except (OSError, ValueError):
        return None
    return record if record.pop("pid", None) == pid else None


def watch(worker_pid: int, pidfd: int, tag: str, log_path: str, forks_fd: int) -> None:
    """Wait for a process to end, record how, and end its family. The guardian's whole life.

    Args:
        log_path: beside which its end is recorded; '' for nowhere.
        forks_fd: where the worker and its forks tell the pids of their forks.
    """
    forks = _collect_forks(pidfd, forks_fd)
    if log_path:
        _record(worker_pid, pidfd, log_path)
    born = {(fork.pid, fork.started) for fork in forks}
    end_family(worker_pid, tag, lambda table: {row.pid for row in table.values() if (row.pid, row.started) in born})


def _record(worker_pid: int, pidfd: int, log_path: str) -> None:
    status = exit_status_of(worker_pid, pidfd)
    code, number = split_status(status) if status is not None else (None, None)
    temporary = f"{record_path(log_path)}.{os.getpid()}"
    try:
        with open(temporary, "w") as file:
            json.dump({"pid": worker_pid, "exit_code": code, "exit_signal": number}, file)
        os.replace(temporary, record_path(log_path))
    except OSError as error:  # the log folder has gone; the family must end all the same
        print(f"guardian of {worker_pid}: no record at {log_path}: {error}", file=sys.stderr)


def _collect_forks(pidfd: int, forks_fd: int) -> set[Process]:
    """Wait until the worker has ended; returns the forks that may live, told from successors of their pids by their start."""
    os.set_blocking(forks_fd, False)
    forks: set[Process] = set()
    watched = [pidfd, forks_fd]
    ended = False
    while not ended:
        ready, _, _ = select.select(watched, [], [])
        ended = pidfd in ready
        if forks_fd in ready or ended:
            try:
                told = os.read(forks_fd, 1 << 16)
            except BlockingIOError:
                continue
            if not told and not ended:
                watched = [pidfd]  # the last writer has gone; the worker's end follows
            for (pid,) in struct.iter_unpack("i", told):
                if (row := _process(pid)) is not None:
                    forks.add(row)
            forks = {fork for fork in forks if (row := _process(fork.pid)) is not None and row.started == fork.started}
    return forks


def spawn_guardian(tag: str, log_path: str) -> None:
    """Start a guardian for this process; it outlives us by the moment it needs."""
    theirs, ours = os.pipe()
    guard(os.getpid(), tag, log_path, theirs)
    os.close(theirs)
    os.register_at_fork(after_in_child=lambda: _tell_fork(ours))
    # Ray writes its worker's title over the environment that others can read, and forks inherit that; a descriptor stays
    # legible.
    os.memfd_create(f"{TAG_VARIABLE}={tag}")


def guard(pid: int, tag: str, log_path: str = "", forks_fd: int | None = None) -> None:
    """Start a guardian for a process that lives; see watch."""
    import subprocess

    subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(pid), tag, log_path],
        stdin=subprocess.DEVNULL if forks_fd is None else forks_fd,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={},
        close_fds=True,
        check=True,
    )


def _tell_fork(fd: int) -> None:
    try:
        os.write(fd, struct.pack("i", os.getpid()))
    except OSError:
        return  # the guardian has gone, or this child has closed what it inherited


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    _pidfd = os.pidfd_open(int(sys.argv[1]))  # before the worker goes on, so that its end cannot come first
    if os.fork():
        os._exit(0)  # an orphan from here on: a Ray worker that ends in order kills its direct children before it does
    watch(int(sys.argv[1]), _pidfd, sys.argv[2], sys.argv[3], sys.stdin.fileno())
