"""The logs of a run, merged in the order of time: driver.log and one log per worker."""

from __future__ import annotations

import codecs
import heapq
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from helmsman.controller._schedulers.run_view import SCRIPT
from helmsman.rpc_server._process.safe_files import open_regular

FETCHED = "fetched"
"""Folder in a run's log directory for copies of files of other nodes."""
_TIME = re.compile(r"^(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_WORKER_LOG = re.compile(r"(.+)-(\d+)\.log")
_POLL_S = 0.2
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)

Line = tuple[str, str, str]
"""Time, source, text. A source is a worker id, or 'script' for driver.log."""


class _Log:
    """One log file, read from its beginning; lines without a time have that of the line before."""

    def __init__(self, path: Path, source: str) -> None:
        self._path, self._source = path, source
        self._offset, self._rest, self._time = 0, "", ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def lines(self, *, whole: bool) -> Iterator[Line]:
        """Yield the new lines; ``whole`` includes an unfinished one."""
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                if file.seek(0, 2) < self._offset:  # it was truncated
                    self._offset = 0
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return
        self._offset += len(content)
        *lines, self._rest = (self._rest + self._decoder.decode(content)).split("\n")
        if whole and self._rest:
            lines, self._rest = [*lines, self._rest], ""
        for line in lines:
            if match := _TIME.match(line):
                self._time = match[1].replace("T", " ").replace(".", ",")
            yield self._time, self._source, line


def files_of(log_dir: Path, pattern: str) -> list[Path]:
    """Return the files of a run whose names fit, in their order, with those of other nodes."""
    folders = log_dir / FETCHED, log_dir
    found = {path.name: path for folder in folders for path in folder.glob(pattern)}
    return [path for _, path in sorted(found.items())]


def find_logs(log_dir: Path, chosen: str | None = None) -> dict[str, Path]:
    """Return the logs of a run by source; ``chosen`` is a role, a worker or 'script'."""
    found = {}
    for path in files_of(log_dir, "*.log"):
        match = _WORKER_LOG.fullmatch(path.name)
        role = match[1] if match else SCRIPT if path.name == "driver.log" else ""
        source = f"{role}/{match[2]}" if match else role
        if role and chosen in (None, role, source):
            found[source] = path
    return found


def read_lines(log_dir: Path, chosen: str | None = None) -> list[Line]:
    """Return the lines of the logs of a run, in the order of time; arguments as in find_logs."""
    logs = (_Log(path, source) for source, path in find_logs(log_dir, chosen).items())
    return merge([*log.lines(whole=True)] for log in logs)


def merge(parts: Iterable[list[Line]]) -> list[Line]:
    """Merge lists of lines that are in the order of time."""
    return list(heapq.merge(*parts, key=lambda each: each[0]))


def follow(log_dir: Path, chosen: str | None, num_lines: int) -> Iterator[tuple[str, str]]:
    """Yield (source, line) of the last lines of a run, and of new ones until the caller stops.

    With ``num_lines`` of 0, it begins with all earlier lines.
    """
    logs: dict[str, _Log] = {}
    while True:
        is_first = not logs
        for source, path in find_logs(log_dir, chosen).items():
            logs.setdefault(source, _Log(path, source))
        new = merge([*log.lines(whole=False)] for log in logs.values())
        yield from ((source, line) for _, source, line in new[-num_lines if is_first else 0 :])
        time.sleep(_POLL_S)
