"""Recordings and logs of workers on other nodes, fetched through the script while it is alive."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helmsman.api.errors import HelmsmanError
from helmsman.controller._diagnosis.stacks import named
from helmsman.controller._node.control_socket import Query
from helmsman.controller._operator.logs import FETCHED, read_lines
from helmsman.controller._operator.runs import FoundRun, ask_run
from helmsman.controller._schedulers.run_view import SCRIPT
from helmsman.rpc_server._host.files import is_file_of
from helmsman.rpc_server._process.recorder import SUFFIX
from helmsman.rpc_server._process.safe_files import private_directory

_STARTED = re.compile(r"(\S+/\d+) \(pid (\d+), ([^)\s]+)\)")
"""A worker in a line of driver.log about a start."""
_AT_ONCE = 4
_ANSWER_S = 6.0


def fetch_files(run: FoundRun) -> list[str]:
    """Copy the recordings and logs of workers on other nodes into the run's log directory.

    Args:
        run: The run; nothing is copied if it has ended.

    Returns:
        For each node with files that are still missing, a text with a command that copies them.
    """
    by_node = _missing(run.log_dir)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        left = pool.map(lambda node: _fetch(run, node, by_node[node]), by_node)
        return [
            f"without the recordings of {named(ids)}, which are on node {node}. This copies them: "
            f"scp '{node}:{run.log_dir}/{{*.events,*.log}}' {run.log_dir}"
            for node, ids in zip(by_node, left, strict=True)
            if ids
        ]


def _missing(log_dir: Path) -> dict[str, list[str]]:
    """Return node -> the workers whose recordings are there."""
    text = "".join(line for _, _, line in read_lines(log_dir, SCRIPT))
    scripts = {path.name.split(".")[1] for path in log_dir.glob(f"{SCRIPT}.*{SUFFIX}")}
    found: dict[str, list[str]] = {}
    for worker_id, pid, node in _STARTED.findall(text):
        # Inline workers are threads of the script, which records for them.
        if pid in scripts or any(log_dir.glob(f"{worker_id.replace('/', '-')}.*{SUFFIX}")):
            continue
        if worker_id not in found.setdefault(node, []):
            found[node].append(worker_id)
    return found


def _fetch(run: FoundRun, node: str, worker_ids: list[str]) -> list[str]:
    """Copy the files of workers on one node; returns those whose files could not be copied."""
    left: list[str] = []
    for number, worker_id in enumerate(worker_ids):
        query = Query(kind="files", target=worker_id, node=node, limit_s=_ANSWER_S)
        try:
            files = ask_run(run, query, dict[str, bytes]) if run.is_alive else {}
        except HelmsmanError:  # no process of the run answers there
            return left + worker_ids[number:]
        left += [worker_id] if not files else []
        with private_directory(run.log_dir, FETCHED) as folder:
            for name in filter(lambda each: is_file_of(worker_id, each), files):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(files[name])
    return left
