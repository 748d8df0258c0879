"""Registry of the runs of this machine: a locked record for each run, and log directories.

The controller keeps its record file locked, and the kernel releases the lock however the controller
ends. Records and logs are in directories that only this user can access. The content of a record is
only displayed: no path in it is ever removed.
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
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from helmsman._process.safe_files import (
    is_own_directory,
    log_directory,
    private_directory,
    read_own,
)
from helmsman._process.upkeep import is_file_at, touch
from helmsman.api.environment import masked_command
from helmsman.api.errors import LogDirectoryError, UntrustedPathError
from helmsman.api.run_state import RunSnapshot

RUN_ID = re.compile(r"[0-9a-f]{10}")
_RECORD_BYTES = 1 << 16
_RECORD_NAME = re.compile(rf"({RUN_ID.pattern})\.json")

RUN_VARIABLE = "HELMSMAN_UP_RUN"
"""Environment variable of a script under `helmsman up`: id of the run that owns its Ray cluster."""
RUN_LABEL, RANK_LABEL = "helmsman-run", "helmsman-rank"
"""Ray labels of the nodes that `helmsman up` starts."""


def new_run_id() -> str:
    """Return a random id of 40 bits, which fits the mark of a run's processes (guardian.py)."""
    return secrets.token_hex(5)


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a run for other processes."""

    run_id: str
    pid: int = 0
    """Process id of the controller."""
    host: str = ""
    command: str = ""
    """Command line with secrets masked."""
    scheduler: str = ""
    log_dir: str
    since: float = 0.0
    """Start time in seconds since the epoch."""

    def snapshot(self, answered_by: str, **found: Any) -> RunSnapshot:
        """Return a snapshot of the run as of now, unless ``found`` has other times."""
        about = msgspec.structs.asdict(self)
        about["started_at"] = about.pop("since")
        times = {"taken_at": time.time(), "answered_by": answered_by}
        return RunSnapshot(**about | times | found)


def record_here(run_id: str, scheduler: str, log_dir: Path) -> RunRecord:
    """Return the record of a run whose controller is this process and begins now."""
    return RunRecord(
        run_id=run_id,
        pid=os.getpid(),
        host=socket.gethostname(),
        command=masked_command(sys.argv)[:500],
        scheduler=scheduler,
        log_dir=str(log_dir),
        since=time.time(),
    )


class Place(NamedTuple):
    """A private directory of Helmsman below one that the user or the system names."""

    base: Path
    names: tuple[str, ...]
    """Path components below ``base``, each accessible only to this user."""

    @property
    def path(self) -> Path:
        return self.base.joinpath(*self.names)

    def open(self, *below: str, create: bool = True) -> contextlib.AbstractContextManager[int]:
        """Open it, or a directory below, as a descriptor. Raises UntrustedPathError or OSError."""
        return private_directory(self.base, *self.names, *below, create=create)


def user_dir() -> Path:
    """Return the folder of this user's runs among the temporary files of this machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container that runs under an unknown user id
        name = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"helmsman-{name}"


def log_places() -> list[Place]:
    """Return the directories for logs of runs without a log_dir: that of new runs, then older ones.

    Hosts may share XDG_STATE_HOME, so each host has its own directory there.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    temporary = Place(user_dir().parent, (user_dir().name,))
    return (
        [Place(Path(state), ("helmsman", socket.gethostname())), temporary]
        if os.path.isabs(state)
        else [temporary]
    )


def record_places() -> list[Place]:
    """Return the directories of records; the first is for new runs.

    A session without XDG_RUNTIME_DIR also finds the records of a session with it.
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
    """Return the private folder for the logs of a run."""
    return log_places()[0].path / run_id


def make_log_dir(path: Path, run_id: str) -> None:
    """Create a run's log directory, or check that an existing one is safe to use.

    Raises:
        UntrustedPathError: An existing directory is not safe to use.
        LogDirectoryError: The directory cannot be created.
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
"""Scheduler name in the record of a ``helmsman up`` node; its log folder is removed with the
record.
"""


class RunLock:
    """A controller's lock on the record of its run.

    Raises:
        UntrustedPathError: Another user's directory has the name of ours.
        OSError: The record cannot be written.
    """

    def __init__(self, run_id: str, scheduler: str, log_dir: Path) -> None:
        self._content = msgspec.json.encode(record_here(run_id, scheduler, log_dir))
        self._name, self._place = f"{run_id}.json", record_places()[0]
        self._fd, self._is_released = -1, False
        self._changing = threading.Lock()
        self._write()
        # A child with the inherited lock would keep the run alive.
        os.register_at_fork(after_in_child=self._forget)

    @property
    def path(self) -> Path:
        """The file."""
        return self._place.path / self._name

    def _write(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._place.open() as folder, contextlib.ExitStack() as undo:
            fd = os.open(self._name, flags, 0o600, dir_fd=folder)
            undo.callback(os.close, fd)
            undo.callback(os.unlink, self._name, dir_fd=folder)
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, self._content)
            undo.pop_all()
        before, self._fd = self._fd, fd
        if before >= 0:
            os.close(before)

    def renew(self) -> bool:
        """Write the record again if it was removed; see Upkeep."""
        with self._changing:
            if self._is_released:
                return False
            if is_file_at(self.path, os.fstat(self._fd)):
                touch(self.path)
                return False
            try:
                self._write()
            except OSError:
                # XDG_RUNTIME_DIR ends with the last session of the user, which a run may outlive.
                others = [each for each in record_places() if each != self._place]
                if not others:
                    raise
                self._place = others[0]
                self._write()
            return True

    def _forget(self) -> None:
        """Give up the lock, in a child without touching the parent's file."""
        self._changing, self._is_released = threading.Lock(), True
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def release(self) -> None:
        """Remove the record after the run has ended normally. Idempotent."""
        with self._changing:
            if not self._is_released:
                with contextlib.suppress(OSError), self._place.open(create=False) as folder:
                    os.unlink(self._name, dir_fd=folder)
                self._forget()


def read_runs() -> list[tuple[RunRecord, bool]]:
    """Return this user's records and whether each controller is alive, oldest first.

    Files and directories of other users are skipped; see refused_places.
    """
    found: dict[str, tuple[RunRecord, bool]] = {}
    for place in record_places():
        with contextlib.suppress(OSError), place.open(create=False) as folder:
            for match in filter(None, map(_RECORD_NAME.fullmatch, os.listdir(folder))):
                with contextlib.suppress(OSError, msgspec.MsgspecError, RecursionError):
                    # The file was removed concurrently, is being written, or is no record.
                    whole = str(place.path / match[0])
                    content, fd = read_own(match[0], folder, whole, _RECORD_BYTES)
                    with os.fdopen(fd):
                        record = msgspec.json.decode(content, type=RunRecord)
                        if record.run_id == match[1]:
                            found.setdefault(record.run_id, (record, _is_locked(fd)))
    return sorted(found.values(), key=lambda each: each[0].since)


def forget_run(run_id: str) -> None:
    for place in record_places():
        with (
            contextlib.suppress(FileNotFoundError, UntrustedPathError),
            place.open(create=False) as folder,
        ):
            os.unlink(f"{run_id}.json", dir_fd=folder)


def log_dirs() -> list[tuple[str, Path, float]]:
    """Return (run id, path, last change in seconds since the epoch) of default log directories.

    The newest is first.
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
    """Return (path, reason) of each unusable place for records or logs.

    An example is another user's directory of the same name.
    """
    refused: dict[str, Path] = {}
    for place in (*record_places(), *log_places()):
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
    return False  # closing the file releases the shared lock
