"""Recordings and logs of workers on other nodes, fetched through the script while it is alive."""

from __future__ import annotations

import contextlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helmsman.api.errors import HelmsmanError
from helmsman.controller._diagnosis.stacks import named
from helmsman.controller._node.control_socket import Query
from helmsman.controller._operator.logs import FETCHED, read_lines
from helmsman.controller._operator.runs import FoundRun, ask_run, take_snapshot
from helmsman.controller._schedulers.run_view import SCRIPT
from helmsman.rpc_server._process.recorder import SUFFIX, is_file_of
from helmsman.rpc_server._process.safe_files import private_directory

_STARTED = re.compile(r"(\S+/\d+) \(pid (\d+), ([^)\s]+)\)")
"""A worker in a line of driver.log about a start."""
_AT_ONCE, _MOST_OF_NODE = 4, 64
_ANSWER_S = 6.0


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
        # Inline workers are threads of the script, which records for them.
        if pid not in scripts and not _has_recording(run.log_dir, worker_id):
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
