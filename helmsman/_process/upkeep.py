"""Upkeep of the files of a run of weeks: cleaners of temporary files, removed logs, full disks.

systemd-tmpfiles, tmpreaper and tmpwatch remove files that were not used for days. All go by
times, so the files of a live run are touched. systemd-tmpfiles also skips a directory, and all
below it, on which a process holds a BSD lock (tmpfiles.d(5), "Age").
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helmsman._process.safe_files import open_log

_LOOK_S = 2.0
_TOUCH_S = 3600.0


class Upkeep:
    """Looks after files on a thread of its own.

    ``report`` receives a text when a file was removed, or when it cannot be made again.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._renew: dict[str, Callable[[], bool]] = {}
        self._failing: set[str] = set()
        self._stopped = threading.Event()

    def add(self, name: str, renew: Callable[[], bool]) -> None:
        """Look after a file, at once for the first time.

        Args:
            name: The file, in texts.
            renew: Makes the file again if it is missing, and returns whether it was removed. Its
                OSError is reported once, until it succeeds again.
        """
        self._renew[name] = renew
        self._look(name)

    def start(self) -> None:
        """Look after the files until ``stop``. Raises RuntimeError if no thread can be started."""
        threading.Thread(target=self._run, name="helmsman-upkeep", daemon=True).start()

    def stop(self) -> None:
        """Stop. Idempotent."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            for name in list(self._renew):
                self._look(name)

    def _look(self, name: str) -> None:
        text = ""
        try:
            if self._renew[name]():
                text = "was removed and begins again. Cleaners of temporary files remove old files"
            self._failing.discard(name)
        except OSError as error:
            if name not in self._failing:
                text = f"cannot be written: {error}. The run goes on without it and tries again"
            self._failing.add(name)
        if text and not self._stopped.is_set():
            self._report(f"{name} {text}")


class Folder:
    """A directory that is locked against systemd-tmpfiles, and touched.

    Its lock is shared, and ends with the process at the latest. It does not make the directory.

    Args:
        path: The directory.
        with_files: Whether to touch everything below, too; only for directories of this run alone.
    """

    def __init__(self, path: str | Path, *, with_files: bool = False) -> None:
        self._path, self._with_files, self._fd = path, with_files, -1
        self._touched = time.monotonic()

    def renew(self) -> bool:
        """Lock and touch the directory; see Upkeep."""
        with contextlib.suppress(OSError):  # it is missing, or its file system has no locks
            if self._fd < 0 or not is_file_at(self._path, os.fstat(self._fd)):
                self.close()
                fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:  # a cleaner is at work here; the next look tries again
                    os.close(fd)
                    raise
                self._fd = fd
            touch(self._path)
            if self._with_files and time.monotonic() - self._touched > _TOUCH_S:
                self._touched = time.monotonic()
                for folder, _, names in os.walk(self._path):
                    for each in (folder, *(os.path.join(folder, name) for name in names)):
                        with contextlib.suppress(OSError):  # removed meanwhile
                            touch(each)
        return False

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LogFile(io.FileIO):
    """A log on a disk that may be full: output that does not fit is left out.

    A line that cannot be written must neither end the call that prints it nor the run. Once there
    is room again, a line states the gap.

    Args:
        fd: The open file.
        closefd: Whether ``close`` closes the file.
        report: Receives the first error.
    """

    def __init__(
        self, fd: int, *, closefd: bool = True, report: Callable[[OSError], object] | None = None
    ) -> None:
        super().__init__(fd, "w", closefd=closefd)
        self._report, self._num_lost = report, 0

    def write(self, data: Any) -> int:
        """Write bytes; returns their number also if they are left out."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            if self._num_lost:
                gap = f"\nhelmsman: {self._num_lost} bytes of output are missing here: disk full\n"
                super().write(gap.encode())
                self._num_lost = 0
            while left:
                written = super().write(left)
                if written is None:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                left = left[written:]
        except OSError as error:
            report, self._report = self._report, None
            self._num_lost += len(left)
            if report is not None:
                report(error)
        return size


class Output:
    """The log to which this process writes its output since ``redirect_output``."""

    def __init__(self, path: str, run_id: str) -> None:
        self._path, self._run_id = path, run_id
        log = os.fstat(1)
        self._log = log if is_file_at(path, log) else None
        """None if the output goes elsewhere."""

    def renew(self) -> bool:
        """Begin the log again if it was removed; see Upkeep."""
        if self._log is None or not os.path.samestat(self._log, os.fstat(1)):
            return False
        if is_file_at(self._path, self._log):
            touch(self._path)
            return False
        log = open_log(self._path, self._run_id)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        self._log = os.fstat(1)
        return True


def is_file_at(path: str | Path, entry: os.stat_result) -> bool:
    """Return whether an open file or directory is still at its path."""
    try:
        return os.path.samestat(os.stat(path), entry)
    except OSError:
        return False


def touch(path: str | Path) -> None:
    """Set the times of a file to now, if they are an hour old."""
    entry = os.stat(path, follow_symlinks=False)
    if min(entry.st_atime, entry.st_mtime) < time.time() - _TOUCH_S:
        os.utime(path, follow_symlinks=False)
