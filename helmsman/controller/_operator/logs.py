"""Files of a run: its logs, merged in the order of time, and copies of those on other nodes."""

from __future__ import annotations

import codecs
import contextlib
import heapq
import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helmsman.api.errors import HelmsmanError
from helmsman.controller._diagnosis.stacks import named
from helmsman.controller._node.control_socket import Query
from helmsman.controller._operator.runs import FoundRun, ask_run, take_snapshot
from helmsman.controller._schedulers.run_view import SCRIPT
from helmsman.rpc_server._process.recorder import SUFFIX, is_file_of
from helmsman.rpc_server._process.safe_files import open_regular, private_directory

FETCHED = "fetched"
"""Folder in a run's log directory for copies of files of other nodes."""
_TIME = re.compile(r"^(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_WORKER_LOG = re.compile(r"(.+)-(\d+)\.log")
_STARTED = re.compile(r"(\S+/\d+) \(pid (\d+), ([^)\s]+)\)")
"""A worker in a line of driver.log about a start."""
_POLL_S = 0.2
_AT_ONCE, _MOST_OF_NODE, _ANSWER_S = 4, 64, 6.0
"""Nodes whose files are fetched at once, workers of each, and the limit of an answer."""
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
    return any(folder.glob(f"{worker_id.replace('/', '-')}.*{SUFFIX}"))


def _missing(run: FoundRun) -> tuple[bool, dict[str, list[str]]]:
    """Return whether the script answers, and node -> the workers whose recordings are there."""
    text = "".join(line for _, _, line in read_lines(run.log_dir, SCRIPT))
    answers, workers = False, list[tuple[str, str, str]](_STARTED.findall(text))
    with contextlib.suppress(HelmsmanError):  # it has ended
        snapshot = take_snapshot(run)
        answers = snapshot.answered_by == "script"
        workers += [(each.worker_id, str(each.pid), each.node) for each in snapshot.workers]
    scripts = {path.name.split(".")[1] for path in run.log_dir.glob(f"{SCRIPT}.*{SUFFIX}")}
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
