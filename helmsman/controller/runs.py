"""The runs of this machine: a record for each, which tells whether its controller lives.

A record is a file that its controller keeps locked. The kernel gives the lock back however the controller ends, and a forked
child of it gives its copy up at once, so a record that is not locked is that of a controller that ended without closing.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import msgspec


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run from outside."""

    run_id: str
    pid: int
    """Of its controller."""
    host: str
    command: str
    scheduler: str
    """Class of its scheduler."""
    log_dir: str
    since: float
    """Seconds since the epoch."""


def user_dir() -> Path:
    """Folder of this user's runs on this machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # in a container that runs under an id which nobody has
        name = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"helmsman-{name}"


def default_log_dir(run_id: str) -> Path:
    """A folder for the logs of a run, of this user alone."""
    return user_dir() / run_id


UP = "helmsman up"
"""What stands for the scheduler of a run that is a node's part of a cluster; its log folder goes with it."""


class RunLock:
    """A controller's hold on the record of its run.

    Raises: OSError where the record cannot be written.
    """

    def __init__(self, run_id: str, scheduler: str, log_dir: Path) -> None:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        record = RunRecord(
            run_id=run_id,
            pid=os.getpid(),
            host=socket.gethostname(),
            command=" ".join(sys.argv)[:500],
            scheduler=scheduler,
            log_dir=str(log_dir),
            since=time.time(),
        )
        self._path = folder / f"{run_id}.json"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.write(self._fd, msgspec.json.encode(record))
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def release(self) -> None:
        """The run has ended in order. Idempotent."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            self._forget()


def read_runs() -> list[tuple[RunRecord, bool]]:
    """The records of this user on this machine, and whether the controller of each lives; oldest first."""
    found = []
    for path in _folder().glob("*.json"):
        try:
            with path.open("rb") as file:
                record = msgspec.json.decode(file.read(), type=RunRecord)
                found.append((record, _is_locked(file.fileno())))
        except (OSError, msgspec.MsgspecError):
            continue  # it has gone meanwhile, or is being written
    return sorted(found, key=lambda each: each[0].since)


def forget_run(run_id: str) -> None:
    """Remove a record."""
    (_folder() / f"{run_id}.json").unlink(missing_ok=True)


def _folder() -> Path:
    return user_dir() / "runs"


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False  # and the shared lock goes with the file
