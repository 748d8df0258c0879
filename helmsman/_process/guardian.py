"""Ends the processes that a worker leaves behind: its family, which it or its children started.

Every process of a family bears the worker's mark, a resource limit. Fork and exec inherit it, and a
new session, an empty environment or closed descriptors do not remove it. Where the kernel rejects
the mark, a family is found by descent, by the worker's process group or session, and by the
worker's tag in the environment.

Standard library only. This file also runs as a script (``python -I -S guardian.py ...``) beside a
worker whose parent is not Helmsman's (a Ray actor). The family then ends even if the worker, the
driver or Ray has failed.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

TAG_VARIABLE = "HELMSMAN_WORKER_TAG"
"""Environment variable that identifies a worker's descendants; unique per worker process."""

_RLIMIT_LOCKS = 10
"""Resource limit that carries the mark. Linux has ignored this limit since 2.4.25, and shows it to
all users in /proc/<pid>/limits.
"""
_MARKED = 1 << 62
_PID_BITS = 22
"""Size of the kernel's largest pid in bits; above it are the 40 bits of the run's id."""

_CLEANERS_S = 2.0
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info of 64 bytes), Linux 6.13
_PIDFD_INFO_EXIT = 1 << 3  # Linux 6.15


class Process(NamedTuple):
    pid: int
    parent: int
    group: int
    session: int
    state: str
    started: int
    """In clock ticks since boot; with the pid, this identifies the process."""


class Mark(NamedTuple):
    """The run and the worker to whose family a process belongs."""

    run_id: str
    worker_pid: int
    """0 for processes of the run that belong to no worker, such as the forkserver."""


def bear_mark(mark: Mark) -> None:
    """Mark this process and all its future descendants. No effect where the kernel rejects it."""
    _set_mark(_MARKED | int(mark.run_id, 16) << _PID_BITS | mark.worker_pid)


def _set_mark(value: int) -> None:
    try:
        resource.setrlimit(_RLIMIT_LOCKS, (value, resource.getrlimit(_RLIMIT_LOCKS)[1]))
    except (OSError, ValueError):  # not Linux, or an administrator has lowered this limit
        return


def mark_of(pid: int) -> Mark | None:
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            words = file.read().partition(b"Max file locks")[2].split(None, 1)
    except OSError:
        return None
    value = int(words[0]) if words and words[0].isdigit() else 0
    if not value & _MARKED:
        return None
    run, worker = divmod(value ^ _MARKED, 1 << _PID_BITS)
    return Mark(f"{run:010x}", worker)


def uid_of(pid: int) -> int | None:
    """Return the real user id of a process; None if it has exited.

    The owner of its /proc entry may be root instead.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            words = file.read().partition(b"\nUid:")[2].split(None, 1)
    except OSError:
        return None
    return int(words[0]) if words else None


def _is_ours(pid: int) -> bool:
    """Whether this process may end another one: marks are readable, so any user can copy one."""
    return os.geteuid() in (0, uid_of(pid))


def process_table() -> dict[int, Process]:
    """Return all visible processes; empty where there is no /proc."""
    table = {}
    for entry in _list("/proc"):
        if entry.isdigit() and (row := process_of(int(entry))) is not None:
            table[row.pid] = row
    return table


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def proc_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file of /proc or /sys; '' if there is none."""
    try:
        with open(path, "rb", buffering=0) as file:
            return (file.read() or b"").decode(errors="replace")
    except OSError:
        return ""


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/<pid>/stat from the third, the state; empty if it has exited."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def process_of(pid: int) -> Process | None:
    fields = stat_fields(pid)
    if not fields:
        return None
    return Process(
        pid, int(fields[1]), int(fields[2]), int(fields[3]), fields[0].decode(), int(fields[19])
    )


def _has_tag(pid: int, tag: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return tag in file.read().split(b"\0")
    except OSError:
        return False


def descendants(root: int, table: dict[int, Process]) -> set[int]:
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


def family(worker_pid: int, tag: str, variable: str = TAG_VARIABLE) -> set[int]:
    """Return the pids of a worker's family, excluding zombies, the worker and the caller.

    Args:
        worker_pid: The worker, which may have exited, or a command that leads its own session.
        tag: Its tag; a worker's begins with the run's id and a slash.
        variable: Environment variable that has the tag.
    """
    mark, entry = Mark(tag.partition("/")[0], worker_pid), f"{variable}={tag}".encode()

    def belongs(row: Process) -> bool:
        is_marked = mark_of(row.pid) == mark or worker_pid in (row.group, row.session)
        return (is_marked and _is_ours(row.pid)) or _has_tag(row.pid, entry)

    return _with_descendants(belongs, worker_pid)


def run_members(run_id: str) -> set[int]:
    """Return the pids marked with a run, and their descendants, without zombies and the caller."""

    def belongs(row: Process) -> bool:
        mark = mark_of(row.pid)
        return mark is not None and mark.run_id == run_id and _is_ours(row.pid)

    return _with_descendants(belongs)


def _with_descendants(belongs: Callable[[Process], bool], root: int | None = None) -> set[int]:
    table = process_table()
    members = set() if root is None else descendants(root, table)
    members |= {row.pid for row in table.values() if row.pid not in members and belongs(row)}
    for pid in list(members):
        members |= descendants(pid, table)
    return {pid for pid in members if pid not in (root, os.getpid()) and table[pid].state != "Z"}


def end_family(
    worker_pid: int, tag: str, *, limit_s: float = 5.0, variable: str = TAG_VARIABLE
) -> set[int]:
    return end_all(lambda: family(worker_pid, tag, variable), limit_s=limit_s)


def end_members(pids: set[int], worker_pid: int, tag: str) -> set[int]:
    """End those of ``pids`` that still belong to a worker's family; returns the survivors."""
    return end_all(lambda: pids & family(worker_pid, tag), limit_s=1.0)


def end_all(find: Callable[[], set[int]], *, limit_s: float = 5.0) -> set[int]:
    """Kill the processes that ``find`` returns until it returns none.

    Processes that clean up after others get up to two seconds for it: Python's trackers of shared
    memory, and the forkserver and watcher of a run within the family. They exit once the processes
    that they watch have exited.

    Returns:
        The survivors after ``limit_s`` seconds.
    """
    deadline = time.monotonic() + limit_s
    patience = time.monotonic() + min(_CLEANERS_S, limit_s / 2)
    while members := find():
        now = time.monotonic()
        kill_all(pid for pid in members if now > patience or not _cleans_up(pid))
        if now > deadline:
            return members
        time.sleep(0.01)
    return set()


def _cleans_up(pid: int) -> bool:
    mark = mark_of(pid)
    if mark is not None and mark.worker_pid == 0:
        return True
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # exited meanwhile, or changed its user, so that it is not ours to signal


def wait_until(condition: Callable[[], bool], limit_s: float, interval_s: float = 0.01) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True


def exit_status_of(pid: int, pidfd: int, limit_s: float = 0.5) -> int | None:
    """Return the wait status of an ended process that is not a child; None if it is unavailable.

    Until its parent reaps it, the process table has the status. Afterwards its pidfd has it, since
    Linux 6.15.
    """
    deadline = time.monotonic() + limit_s
    while True:
        status = status_of_zombie(pid)
        if status is not None:
            return status
        info = bytearray(64)
        struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        except ProcessLookupError:
            # The process is being reaped; the next iteration finds it reaped.
            info = bytearray(64)
        except OSError:
            return None  # the kernel does not support PIDFD_GET_INFO
        if struct.unpack_from("Q", info, 0)[0] & _PIDFD_INFO_EXIT:
            return int(struct.unpack_from("i", info, 60)[0])
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def status_of_zombie(pid: int) -> int | None:
    """Return the wait status of a process that has ended and was not reaped; None for any other."""
    fields = stat_fields(pid)
    return int(fields[49]) if fields[:1] == [b"Z"] else None


def split_status(status: int) -> tuple[int | None, int | None]:
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def record_path(log_path: str) -> str:
    return f"{log_path}.exit"


def read_record(log_path: str, pid: int) -> dict[str, int | None] | None:
    """Read the guardian's record of a worker's end: {"exit_code", "exit_signal"}.

    Returns None if there is no record of this process. An earlier process may have used the log.
    """
    try:
        with open(
            os.open(
                record_path(log_path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        ) as file:
            record = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    if (
        not isinstance(record, dict)
        or record.pop("pid", None) != pid
        or record.keys() != {"exit_code", "exit_signal"}
    ):
        return None  # of another process, or planted in a world-writable directory
    return record


def watch(
    worker_pid: int, pidfd: int, tag: str, log_path: str, folder: int, tracker_fd: int
) -> None:
    """Run the guardian: wait for a process to end, record its exit status, and end its family.

    Args:
        worker_pid: The process.
        pidfd: The same, as a pidfd.
        tag: The worker's tag.
        log_path: The worker's log, beside which the record is written; '' for no record.
        folder: Open descriptor of the log's directory.
        tracker_fd: The tracker of shared memory starts when the first bytes arrive here.
    """
    waiting = select.poll()
    for fd in (pidfd, tracker_fd):
        waiting.register(fd, select.POLLIN)
    ended = False
    while not ended:
        ready = dict(waiting.poll())
        ended = pidfd in ready
        if tracker_fd in ready:
            waiting.unregister(tracker_fd)
            if ready[tracker_fd] & select.POLLIN:  # else all writers closed it
                _start_tracker(tracker_fd)
            os.close(tracker_fd)
    if log_path:
        _record(worker_pid, pidfd, log_path, folder)
    end_family(worker_pid, tag)


def _start_tracker(fd: int) -> None:
    import subprocess

    program = f"from multiprocessing.resource_tracker import main; main({fd})"
    subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.DEVNULL, pass_fds=[fd]
    )


def _record(worker_pid: int, pidfd: int, log_path: str, folder: int) -> None:
    status = exit_status_of(worker_pid, pidfd)
    code, number = split_status(status) if status is not None else (None, None)
    name = os.path.basename(record_path(log_path))
    temporary = f"{name}.{os.getpid()}"
    try:
        made = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
        with open(made, "w") as file:
            json.dump({"pid": worker_pid, "exit_code": code, "exit_signal": number}, file)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:  # the log directory was removed; the family must end all the same
        print(f"guardian of {worker_pid}: no record at {log_path}: {error}", file=sys.stderr)


def spawn_guardian(tag: str, log_path: str) -> None:
    """Mark this process, and start a guardian for it, which exits after it.

    The guardian starts this process's tracker of shared memory. Ray kills the children of a worker
    that exits regularly. A tracker started by the worker itself would thus be killed before it has
    removed the names of the worker's segments.
    """
    from multiprocessing import resource_tracker

    theirs, ours = os.pipe()
    guard(os.getpid(), tag, log_path, theirs)
    os.close(theirs)
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None:
        tracker._fd = ours  # in the same way a child of multiprocessing gets its parent's tracker
    else:
        os.close(ours)
    bear_mark(Mark(tag.partition("/")[0], os.getpid()))


def guard(pid: int, tag: str, log_path: str = "", tracker_fd: int | None = None) -> None:
    import subprocess

    subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(pid), tag, log_path],
        stdin=subprocess.PIPE if tracker_fd is None else tracker_fd,  # the pipe is closed at once
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={},
        close_fds=True,
        check=True,
    )


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    # The guardian belongs to no family, even if the worker's driver runs in a worker itself.
    _set_mark(resource.RLIM_INFINITY)
    # Opened before the worker continues, so that it cannot end first.
    _pidfd = os.pidfd_open(int(sys.argv[1]))
    _log_path = sys.argv[3]
    _folder = (
        os.open(os.path.dirname(_log_path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if _log_path
        else -1
    )
    if os.fork():
        # The guardian becomes an orphan: a Ray worker that exits regularly kills its direct
        # children first.
        os._exit(0)
    import runpy

    _title = runpy.run_path(os.path.join(os.path.dirname(__file__), "title.py"))
    _run_id, _, _whom = sys.argv[2].partition("/")
    _title["set_title"](f"helmsman: guardian of {'/'.join(_whom.split('/')[:2])} (run {_run_id})")
    _tracker_fd = os.dup(sys.stdin.fileno())
    sys.stdin.close()  # only the tracker reads from it
    watch(int(sys.argv[1]), _pidfd, sys.argv[2], _log_path, _folder, _tracker_fd)
