"""driver.log: the roles, deaths, restarts, weight versions and warnings of a run."""

from __future__ import annotations

import contextlib
import io
import logging
import logging.handlers
import os
import sys
import threading
from collections.abc import Collection
from pathlib import Path

from helmsman._process.safe_files import open_log
from helmsman._process.upkeep import LogFile, touch
from helmsman.api.environment import masked_command
from helmsman.api.version import __version__
from helmsman.controller._scheduler.run_registry import make_log_dir

log = logging.getLogger(__name__)

story = logging.getLogger("helmsman.run")
"""Logger of run events. It does not propagate, so a script's handlers receive only warnings."""
story.setLevel(logging.INFO)
story.propagate = False

_PACKAGE = logging.getLogger("helmsman")
_SHOWN = 8


class DriverLog(logging.handlers.WatchedFileHandler):
    """Writes run events and warnings of this process to a run's driver.log.

    Every run that is open in this process receives the same lines. A file that was removed is made
    again; lines that a full disk does not take are left out.
    """

    def __init__(self, log_dir: Path, run_id: str) -> None:
        super().__init__(
            log_dir / "driver.log", mode="w", delay=True
        )  # with "a", a late record would reopen the file
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._run_id = run_id
        self._is_begun = self._is_attached = self._was_removed = False

    def begin(self, scheduler: str) -> None:
        """Open the file and start logging. Idempotent."""
        if self._is_begun:
            return
        self._is_begun = True
        try:
            make_log_dir(Path(self.baseFilename).parent, self._run_id)
            self.stream = self._open()
            self._statstream()
        except OSError as error:
            log.warning("run %s has no driver log: %s", self._run_id, error)
            return
        self._is_attached = True
        for logger in (story, _PACKAGE):
            logger.addHandler(self)
        versions = f"helmsman {__version__}, python {sys.version.split()[0]}"
        command = masked_command(sys.argv)[:200]
        story.info(
            "run %s begins: %s, pid %d, %s, %s",
            self._run_id,
            scheduler,
            os.getpid(),
            versions,
            command,
        )

    def end(self) -> None:
        """Close the file. Idempotent."""
        if self._is_attached:
            self._is_attached = False
            story.info("run %s is closed", self._run_id)
            for logger in (story, _PACKAGE):
                logger.removeHandler(self)
        with contextlib.suppress(OSError):  # network file systems report a full disk here
            self.close()

    def renew(self) -> bool:
        """Open the file again if it was removed; see Upkeep."""
        self.acquire()
        try:
            if self._is_attached:
                self.reopenIfNeeded()
                if self.stream is None:
                    self.stream = self._open()
                    self._statstream()
                touch(self.baseFilename)
            was_removed, self._was_removed = self._was_removed, False
            return was_removed
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # it cannot be opened again, which renew() reports
            super().emit(record)
        # Without handlers, logging prints warnings to stderr; adding this one must not stop that.
        is_only = not logging.root.handlers and all(
            isinstance(each, DriverLog) for each in _PACKAGE.handlers
        )
        is_for_stderr = record.name != story.name and self is _PACKAGE.handlers[0] and is_only
        if (
            is_for_stderr
            and logging.lastResort is not None
            and record.levelno >= logging.lastResort.level
        ):
            logging.lastResort.handle(record)

    def _report(self, error: OSError) -> None:
        log.warning(
            "run %s: its log %s cannot be written: %s. The run goes on; lines are left out until "
            "there is room",
            self._run_id,
            self.baseFilename,
            error.strerror,
        )

    def _open(self) -> io.TextIOWrapper:
        file = LogFile(open_log(self.baseFilename, self._run_id), report=self._report)
        self._was_removed = self._is_attached
        return io.TextIOWrapper(file, encoding="utf-8", write_through=True)


def script_failure() -> BaseException | None:
    """Return the exception that propagates through this thread, or has ended the script."""
    error = sys.exc_info()[1]
    if error is None and not threading.main_thread().is_alive():
        error = getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) and not error.code else error


def listed(items: Collection[str]) -> str:
    """Format the first items and the number of the others."""
    shown = list(items)[:_SHOWN]
    return ", ".join(shown) + (
        f" and {len(items) - len(shown)} more" if len(items) > len(shown) else ""
    )
