"""The logs of a run, merged in the order of time: driver.log and one log per worker."""

from __future__ import annotations

import codecs
import heapq
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from helmsman.rpc_server._process.safe_files import open_regular

_TIME = re.compile(r"^(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_WORKER_LOG = re.compile(r"(.+)-(\d+)\.log")
_POLL_S = 0.2
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class _Log:
    """One log file, read from its beginning; lines without a time have that of the line before."""

    def __init__(self, path: Path, source: str) -> None:
        self.source = source
        self._path, self._offset, self._rest = path, 0, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._time = ""

    def lines(self, *, whole: bool = False) -> list[tuple[str, str, str]]:
        """Return (time, source, line) of the new lines; ``whole`` includes an unfinished one."""
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                if file.seek(0, 2) < self._offset:  # it was truncated
                    self._offset = 0
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []
        self._offset += len(content)
        *lines, self._rest = (self._rest + self._decoder.decode(content)).split("\n")
        if whole and self._rest:
            lines, self._rest = [*lines, self._rest], ""
        found = []
        for line in lines:
            if match := _TIME.match(line):
                self._time = match[1].replace("T", " ").replace(".", ",")
            found.append((self._time, self.source, line))
        return found


def source_of(path: Path) -> str | None:
    """Return the worker id of a log, or 'script' for driver.log; None for another file."""
    if path.name == "driver.log":
        return "script"
    match = _WORKER_LOG.fullmatch(path.name)
    return f"{match[1]}/{match[2]}" if match else None


def read_lines(log_dir: Path, chosen: str | None) -> list[tuple[str, str, str]]:
    """Return (time, source, line) of the logs of a run, in the order of time.

    Args:
        log_dir: Folder of the logs.
        chosen: Only this role or worker; 'script' for driver.log.
    """
    logs: dict[Path, _Log] = {}
    _find(log_dir, chosen, logs)
    return merge([log.lines(whole=True) for log in logs.values()])


def merge(parts: Iterable[list[tuple[str, str, str]]]) -> list[tuple[str, str, str]]:
    """Merge lists of (time, source, line) that are in the order of time."""
    return list(heapq.merge(*parts, key=lambda each: each[0]))


def follow(log_dir: Path, chosen: str | None, num_lines: int) -> Iterator[tuple[str, str]]:
    """Yield (source, line) of the last lines of a run, and of new ones until the caller stops.

    Args:
        log_dir: Folder of the logs.
        chosen: Only this role or worker; 'script' for driver.log.
        num_lines: Number of earlier lines; 0 for all.
    """
    logs: dict[Path, _Log] = {}
    _find(log_dir, chosen, logs)
    lines = merge([log.lines() for log in logs.values()])
    yield from ((source, line) for _, source, line in lines[-num_lines:])
    while True:
        time.sleep(_POLL_S)
        _find(log_dir, chosen, logs)
        new = merge([log.lines() for log in logs.values()])
        yield from ((source, line) for _, source, line in new)


def sources(log_dir: Path) -> list[str]:
    """Return the worker ids, and 'script', of the logs in a folder."""
    return sorted(filter(None, map(source_of, log_dir.glob("*.log"))))


def _find(log_dir: Path, chosen: str | None, logs: dict[Path, _Log]) -> None:
    for path in sorted(log_dir.glob("*.log")):
        source = source_of(path)
        if path in logs or source is None:
            continue
        if chosen in (None, source, source.rpartition("/")[0]):
            logs[path] = _Log(path, source)


def coloured(source: str, line: str, *, colour: bool) -> str:
    """Format a line with its source."""
    if not colour:
        return f"[{source}] {line}"
    number = _COLOURS[sum(source.encode()) % len(_COLOURS)]
    return f"\x1b[{number}m[{source}]\x1b[0m {line}"
