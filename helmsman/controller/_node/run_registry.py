"""The runs of this machine: a record for each, which tells whether its controller lives, and
directories for logs.

A record is a file that its controller keeps locked; the kernel gives the lock back however the
controller ends. Records and logs lie in directories of this user alone. The content of a record is
only shown: no path in it is ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import secrets
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from helmsman.api.environment import masked_command
from helmsman.api.errors import LogDirectoryError, UntrustedPathError
from helmsman.rpc_server._process.safe_files import (
    is_own_directory,
    log_directory,
    private_directory,
    read_own,
)

RUN_ID = re.compile(r"[0-9a-f]{10}")
_RECORD_NAME = re.compile(rf"({RUN_ID.pattern})\.json")

RUN_VARIABLE = "HELMSMAN_UP_RUN"
"""Environment variable of a script under `helmsman up`: id of the run that owns its Ray cluster."""
RUN_LABEL, RANK_LABEL = "helmsman-run", "helmsman-rank"
"""Ray labels of the nodes that `helmsman up` starts."""


def new_run_id() -> str:
    """A random id of 40 bits, the room for it in the mark of a run's processes (guardian.py)."""
    return secrets.token_hex(5)


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a run for other processes."""

    run_id: str
    pid: int
    """Of its controller."""
    host: str
    command: str
    """Secrets masked."""
    scheduler: str
    log_dir: str
    since: float
    """Seconds since the epoch."""


class Place(NamedTuple):
    """A directory of Helmsman's own, below one that the user or the system has named."""

    base: Path
    names: tuple[str, ...]
    """Components below ``base``, each of this user alone."""

    @property
    def path(self) -> Path:
        return self.base.joinpath(*self.names)

    def open(self, *below: str, create: bool = True) -> contextlib.AbstractContextManager[int]:
        """A descriptor of it, or of a directory below. Raises: UntrustedPathError, OSError."""
        return private_directory(self.base, *self.names, *below, create=create)


def user_dir() -> Path:
    """Folder of this user's runs among the temporary files of this machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # in a container that runs under an unknown id
        name = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"helmsman-{name}"


def log_places() -> list[Place]:
    """Directories of the logs of runs without a log_dir: first that for new runs, then others that
    earlier runs may have used.

    Hosts may share XDG_STATE_HOME, so each has a directory of its own there.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    temporary = Place(user_dir().parent, (user_dir().name,))
    return (
        [Place(Path(state), ("helmsman", socket.gethostname())), temporary]
        if os.path.isabs(state)
        else [temporary]
    )


def _record_places() -> list[Place]:
    """Directories of records, in the order of log_places. A session without XDG_RUNTIME_DIR finds
    those of one that has it.
    """
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    usual = f"/run/user/{os.getuid()}"
    places = [
        Place(Path(each), ("helmsman", "runs"))
        for each in dict.fromkeys([named, usual])
        if os.path.isabs(each) and is_own_directory(each)
    ]
    temporary = Place(user_dir().parent, (user_dir().name, "runs"))
    return (
        [*places, temporary]
        if named and places and places[0].base == Path(named)
        else [temporary, *places]
    )


def default_log_dir(run_id: str) -> Path:
    """A folder for the logs of a run, of this user alone."""
    return log_places()[0].path / run_id


def make_log_dir(path: Path, run_id: str) -> None:
    """Make a run's log directory, its default_log_dir or one that the user has named, or check that
    an existing one is safe to use. Raises: UntrustedPathError, LogDirectoryError.
    """
    own = next((place for place in log_places() if path == place.path / run_id), None)
    try:
        with own.open(run_id) if own is not None else log_directory(path, run_id):
            return
    except UntrustedPathError:
        raise
    except OSError as error:
        raise LogDirectoryError(
            path=str(path), reason=f"{error.strerror}: {error.filename}"
        ) from error


UP = "helmsman up"
"""The scheduler in the record of a node's part of a cluster, whose log folder is removed with
it.
"""


class RunLock:
    """A controller's hold on the record of its run. Raises: UntrustedPathError where another user's
    directory has the name of ours; OSError where the record cannot be written.
    """

    def __init__(self, run_id: str, scheduler: str, log_dir: Path) -> None:
        record = RunRecord(
            run_id=run_id,
            pid=os.getpid(),
            host=socket.gethostname(),
            command=masked_command(sys.argv)[:500],
            scheduler=scheduler,
            log_dir=str(log_dir),
            since=time.time(),
        )
        self._name = f"{run_id}.json"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _record_places()[0].open() as folder, contextlib.ExitStack() as undo:
            self._fd = os.open(self._name, flags, 0o600, dir_fd=folder)
            undo.callback(os.close, self._fd)
            undo.callback(os.unlink, self._name, dir_fd=folder)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.write(self._fd, msgspec.json.encode(record))
            self._folder = os.dup(folder)
            undo.pop_all()
        # a child that inherits the lock would pass for the controller
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
                os.close(self._folder)
            self._fd = -1

    def release(self) -> None:
        """The run has ended in order. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=self._folder)
            self._forget()


def read_runs() -> list[tuple[RunRecord, bool]]:
    """The records of this user on this machine, and whether the controller of each lives; oldest
    first.

    Files of other users, and whole directories of theirs, are passed over; see refused_places.
    """
    found: dict[str, tuple[RunRecord, bool]] = {}
    for place in _record_places():
        with contextlib.suppress(OSError), place.open(create=False) as folder:
            for match in filter(None, map(_RECORD_NAME.fullmatch, os.listdir(folder))):
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    # it has gone meanwhile, or is being written
                    content, fd = read_own(match[0], folder, str(place.path / match[0]))
                    with os.fdopen(fd):
                        record = msgspec.json.decode(content, type=RunRecord)
                        if record.run_id == match[1]:
                            found.setdefault(record.run_id, (record, _is_locked(fd)))
    return sorted(found.values(), key=lambda each: each[0].since)


def forget_run(run_id: str) -> None:
    for place in _record_places():
        with (
            contextlib.suppress(FileNotFoundError, UntrustedPathError),
            place.open(create=False) as folder,
        ):
            os.unlink(f"{run_id}.json", dir_fd=folder)


def log_dirs() -> list[tuple[str, Path, float]]:
    """(run id, path, seconds since the epoch of its last change) of each default log directory,
    newest first.
    """
    found = []
    for place in log_places():
        with contextlib.suppress(OSError), place.open(create=False) as folder:
            for name in filter(RUN_ID.fullmatch, os.listdir(folder)):
                with contextlib.suppress(FileNotFoundError):
                    entry = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.geteuid():
                        found.append((name, place.path / name, entry.st_mtime))
    return sorted(found, key=lambda each: -each[2])


def refused_places() -> list[tuple[Path, str]]:
    """(path, reason) of each place for records or logs that cannot be used, such as another user's
    directory of our name.
    """
    refused: dict[str, Path] = {}
    for place in (*_record_places(), *log_places()):
        try:
            with place.open(create=False):
                pass
        except FileNotFoundError:
            continue
        except OSError as error:
            refused.setdefault(str(error), place.path)
    return [(path, reason) for reason, path in refused.items()]


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False  # and the shared lock goes with the file
