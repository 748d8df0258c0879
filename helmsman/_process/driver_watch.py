"""Ends a forkserver and its run once the driver has exited, even while the forkserver imports.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator

from helmsman._process.guardian import (
    Mark,
    bear_mark,
    descendants,
    end_all,
    process_table,
    run_members,
)
from helmsman._process.title import set_title

NO_PIDFD = -1
"""Replaces the driver's pidfd on a system without pidfds."""

_GRACE_S = 3.0
"""Seconds that a forkserver may take to end its workers itself."""


@contextlib.contextmanager
def pidfd_of_this_process() -> Iterator[int]:
    """Yield a pidfd of the driver for a forkserver.

    It reports the driver's end even while children of the driver hold its sockets open.
    """
    if not hasattr(os, "pidfd_open"):
        yield NO_PIDFD
        return
    pidfd = os.pidfd_open(os.getpid())
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def watch_driver(driver: int, run_id: str, channel: int | None = None) -> int:
    """Mark this process, the forkserver, as one of the run, and fork a watcher.

    A thread cannot watch: an import may hold the interpreter lock, and a process that forks workers
    must have one thread.

    Args:
        driver: The driver's pidfd.
        run_id: The run.
        channel: Connection to the driver. With it the run ends when the driver closes it, and
            continues if the forkserver exits; without it the run ends with the forkserver.

    Returns:
        The watcher's pid; 0 where the system has no pidfds, and therefore no watcher.
    """
    bear_mark(Mark(run_id, 0))
    # With a channel it forks Ray's workers: Ray needs the arguments that a title would overwrite.
    if channel is None:
        set_title(f"helmsman: forkserver (run {run_id})")
    if driver == NO_PIDFD:
        return 0
    server, starter = os.pidfd_open(os.getpid()), os.getppid()
    pid = os.fork()
    if pid:
        os.close(server)
        return pid
    code = 1
    try:
        _watch(driver, server, starter, run_id, channel)
        code = 0
    except BaseException:  # noqa: BLE001 - the process's outermost frame: it ends here in any case
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _watch(driver: int, server: int, starter: int, run_id: str, channel: int | None) -> None:
    os.setsid()
    set_title(f"helmsman: watcher (run {run_id})")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kept = {2, driver, server, channel}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(int(name))
    ending = select.poll()
    ending.register(driver, select.POLLIN)
    if channel is None:
        ending.register(server, select.POLLIN)
    else:
        ending.register(channel, 0)  # only hang-up, not the messages on it
    ending.poll()
    exit_ = select.poll()
    exit_.register(server, select.POLLIN)
    if not exit_.poll(_GRACE_S * 1000):
        signal.pidfd_send_signal(server, signal.SIGKILL)

    def left() -> set[int]:
        members = run_members(run_id)
        return (
            members
            if channel is not None or _has_ended(driver)
            else members - _successors(starter, run_id)
        )

    end_all(left)


def _has_ended(pidfd: int) -> bool:
    look = select.poll()
    look.register(pidfd, select.POLLIN)
    return bool(look.poll(0))


def _successors(starter: int, run_id: str) -> set[int]:
    """Return the forkserver that replaced the ended one of a living driver, and its descendants."""
    table, members = process_table(), run_members(run_id)
    servers = {pid for pid in members if pid in table and table[pid].parent == starter}
    return servers.union(*(descendants(pid, table) for pid in servers))
