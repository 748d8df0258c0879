"""Files of a run: its logs, merged in the order of time, and copies of those on other nodes."""

from __future__ import annotations

import codecs
import collections
import contextlib
import fnmatch
import heapq
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from helmsman._desk.control_socket import Query
from helmsman._desk.runs import FoundRun, ask_run, take_snapshot
from helmsman._desk.stacks import named
from helmsman._process.recorder import SUFFIX, is_file_of, why_not_read
from helmsman._process.safe_files import open_regular, private_directory
from helmsman.api.errors import HelmsmanError
from helmsman.api.observer import SCRIPT

FETCHED = "fetched"
"""Folder in a run's log directory for copies of files of other nodes."""
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9:]{8}(?:[.,][0-9]{1,9})?")
_AHEAD_S = 2 * 86400.0
"""A time this far beyond the last change of its file is not that of a line. Nodes and the machine
that has a copy may have other time zones."""
_WORKER_LOG = re.compile(r"(.+)-(\d+)\.log")
_STARTED = re.compile(r"(\S{1,200}/\d+) \(pid (\d+), ([^)\s]+)\)")
"""A worker in a line of driver.log about a start."""
_PART_BYTES, _LONGEST_LINE, _MOST_UNREAD = 1 << 18, 1 << 14, 8
MOST_BYTES, _MOST_OF_ALL, _LEAST_BYTES = 4 << 20, 256 << 20, 1 << 16
"""Commands read the last 4 MiB of each log; less, down to 64 KiB, if all have more than 256 MiB."""
_POLL_S = 0.2
_AT_ONCE, _MOST_OF_NODE, _ANSWER_S = 4, 64, 6.0
"""Nodes whose files are fetched at once, workers of each, and the limit of an answer."""
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)

Line = tuple[float, str, str]
"""Seconds since the epoch, source, text. A source is a worker id, or 'script' for driver.log."""


def parse_time(text: str, latest: float = math.inf) -> float | None:
    """Return the time at the beginning of a line, in seconds since the epoch.

    Args:
        text: The line.
        latest: The latest possible time.

    Returns:
        None if the line begins with no time, or with none after 1970 and up to ``latest``.
    """
    match = _TIME.match(text)
    if match is None:
        return None
    try:
        at = datetime.fromisoformat(match[0]).timestamp()
    except (ValueError, OverflowError, OSError):  # 30 February, or the year 1
        return None
    return at if 0.0 < at <= latest else None


class _Log:
    """One log file; lines without a time have that of the line before.

    With ``most_bytes``, the first reading begins so many bytes before the end of the file. It is
    open only while a part of it is read, since a run may have more logs than descriptors.
    """

    def __init__(self, path: Path, source: str, most_bytes: int | None = None) -> None:
        self._path, self._source, self._most_bytes = path, source, most_bytes
        self._offset, self._rest, self._time, self._latest = 0, "", 0.0, math.inf
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def lines(self, *, whole: bool) -> Iterator[Line]:
        """Yield the new lines; ``whole`` includes an unfinished one."""
        try:
            end = self._open_end()
            while content := self._part(end):
                *lines, self._rest = (self._rest + self._decoder.decode(content)).split("\n")
                if len(self._rest) > _LONGEST_LINE:
                    lines, self._rest = [*lines, self._rest], ""
                yield from map(self._line, lines)
        except OSError:
            return  # list_unread names the file
        if whole and self._rest:
            rest, self._rest = self._rest, ""
            yield self._line(rest)

    def _open_end(self) -> int:
        with os.fdopen(open_regular(self._path), "rb") as file:
            entry = os.fstat(file.fileno())
            if entry.st_size < self._offset:  # it was truncated
                self._offset = 0
            skipped = entry.st_size - (self._most_bytes or entry.st_size)
            if self._offset == 0 and skipped > 0:
                file.seek(skipped)
                self._offset = skipped + len(file.readline(_LONGEST_LINE))
            self._latest = entry.st_mtime + _AHEAD_S
            return entry.st_size

    def _part(self, end: int) -> bytes:
        if self._offset >= end:
            return b""
        with os.fdopen(open_regular(self._path), "rb") as file:
            file.seek(self._offset)
            content = file.read(min(_PART_BYTES, end - self._offset))
        self._offset += len(content)
        return content

    def _line(self, text: str) -> Line:
        self._time = parse_time(text, self._latest) or self._time
        return self._time, self._source, text


def files_of(log_dir: Path, pattern: str) -> list[Path]:
    """Return the files of a run whose names fit, in their order, with those of other nodes."""
    found = dict[str, Path]()
    for folder in (log_dir / FETCHED, log_dir):
        with contextlib.suppress(OSError):
            found |= {name: folder / name for name in fnmatch.filter(os.listdir(folder), pattern)}
    return [path for _, path in sorted(found.items())]


def list_unread(log_dir: Path) -> list[str]:
    """Return a text for each log and recording that cannot be read, and for other versions'."""
    texts = []
    for path in [*files_of(log_dir, "*.log"), *files_of(log_dir, f"*{SUFFIX}")]:
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                reason = why_not_read(file) if path.suffix == SUFFIX else ""
        except OSError as error:
            reason = str(error)
        if reason:
            texts.append(f"{shown(path.name)} is left out: {reason}")
    more = len(texts) - _MOST_UNREAD
    return texts[:_MOST_UNREAD] + ([f"{more} more files are left out"] if more > 0 else [])


def shown(path: str) -> str:
    """Return a path for texts and JSON; bytes that are not UTF-8 are replaced."""
    return os.fsencode(path).decode(errors="replace")


def find_logs(log_dir: Path, chosen: str | None = None) -> dict[str, Path]:
    """Return the logs of a run by source; ``chosen`` is a role, a worker or 'script'."""
    found = {}
    for path in files_of(log_dir, "*.log"):
        name = shown(path.name)
        match = _WORKER_LOG.fullmatch(name)
        role = match[1] if match else SCRIPT if name == "driver.log" else ""
        source = f"{role}/{match[2]}" if match else role
        if role and chosen in (None, role, source):
            found[source] = path
    return found


def read_lines(
    log_dir: Path, chosen: str | None = None, most_bytes: int | None = MOST_BYTES
) -> Iterator[Line]:
    """Yield the lines of the logs of a run in the order of time, with little of them in memory.

    Args:
        log_dir: The log directory.
        chosen: As in find_logs.
        most_bytes: Read so many bytes at the end of each log, fewer if there are many logs; None
            for all.
    """
    found = find_logs(log_dir, chosen)
    if most_bytes is not None:
        most_bytes = min(most_bytes, max(_LEAST_BYTES, _MOST_OF_ALL // max(len(found), 1)))
    return merge(_Log(path, source, most_bytes).lines(whole=True) for source, path in found.items())


def merge(parts: Iterable[Iterable[Line]]) -> Iterator[Line]:
    """Merge lines that are in the order of time."""
    return heapq.merge(*parts, key=lambda each: each[0])


def follow(log_dir: Path, chosen: str | None, num_lines: int) -> Iterator[tuple[str, str]]:
    """Yield (source, line) of the last lines of a run, and of new ones until the caller stops.

    With ``num_lines`` of 0, it begins with all earlier lines.
    """
    logs: dict[str, _Log] = {}
    while True:
        is_first = not logs
        for source, path in find_logs(log_dir, chosen).items():
            most_bytes = MOST_BYTES if is_first and num_lines else None
            logs.setdefault(source, _Log(path, source, most_bytes))
        new = merge(log.lines(whole=False) for log in logs.values())
        if is_first and num_lines:
            new = iter(collections.deque(new, num_lines))
        yield from ((source, line) for _, source, line in new)
        time.sleep(_POLL_S)


def fetch_files(run: FoundRun) -> list[str]:
    """Copy the recordings and logs of workers on other nodes into the log directory of a live run.

    Returns a text with a command to copy them for each node whose files are still missing.
    """
    answers, by_node = _missing(run)
    most = _MOST_OF_NODE if answers else 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        left = list(pool.map(lambda node: _fetch(run, node, by_node[node], most), by_node))
    texts = []
    for node, ids in zip(by_node, left, strict=True):
        has_older = any(_has_recording(run.log_dir / FETCHED, each) for each in ids)
        if ids:
            texts.append(
                f"with{' older' if has_older else 'out the'} recordings of {named(ids)}, which are "
                f"on node {node}. This copies them: "
                f"scp '{node}:{run.log_dir}/{{*.events,*.log}}' {run.log_dir}"
            )
    return texts


def _has_recording(folder: Path, worker_id: str) -> bool:
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
        return any(name.endswith(SUFFIX) and is_file_of(worker_id, name) for name in names)
    return False


def _missing(run: FoundRun) -> tuple[bool, dict[str, list[str]]]:
    """Return whether the script answers, and node -> the workers whose recordings are there."""
    text = "\n".join(line for _, _, line in read_lines(run.log_dir, SCRIPT))
    answers, workers = False, list[tuple[str, str, str]](_STARTED.findall(text))
    with contextlib.suppress(HelmsmanError):  # it has ended
        snapshot = take_snapshot(run)
        answers = snapshot.answered_by == "script"
        workers += [(each.worker_id, str(each.pid), each.node) for each in snapshot.workers]
    scripts = {path.name.split(".")[1] for path in files_of(run.log_dir, f"{SCRIPT}.*{SUFFIX}")}
    found: dict[str, list[str]] = {}
    for worker_id, pid, node in workers:
        # Inline workers are threads of the script, which records for them. The log also names
        # workers of other runs of the script; their files are on this machine.
        if (
            not node.startswith("127.")
            and pid not in scripts
            and not _has_recording(run.log_dir, worker_id)
        ):
            found.setdefault(node, []).append(worker_id)
    return answers, {node: list(dict.fromkeys(ids)) for node, ids in found.items()}


def _fetch(run: FoundRun, node: str, worker_ids: list[str], most: int) -> list[str]:
    """Copy the files of workers on one node; returns those whose files could not be copied."""
    left = worker_ids[most:]
    for number, worker_id in enumerate(worker_ids[:most]):
        query = Query(kind="files", target=worker_id, node=node, limit_s=_ANSWER_S)
        try:
            files = ask_run(run, query, dict[str, bytes])
        except HelmsmanError:  # no process of the run answers there
            return left + worker_ids[number:most]
        left += [] if files else [worker_id]
        with private_directory(run.log_dir, FETCHED) as folder:
            for name in filter(lambda each: is_file_of(worker_id, each), files):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(files[name])
    return left
