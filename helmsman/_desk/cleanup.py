"""Clean-up of old logs, and of processes and folders of runs whose controller was killed.

Processes are found by their mark or tag. A run is dead if its record exists and is not locked.
Processes without a record belong to a controller on another machine, or to one whose record was
removed; they are ended only if the run is named explicitly. Only directories whose paths are built
from a run's id are removed, and only real directories of this user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from helmsman._process.guardian import (
    TAG_VARIABLE,
    mark_of,
    process_of,
    process_table,
    uid_of,
    wait_until,
)
from helmsman._process.safe_files import is_own_directory, remove_tree
from helmsman.api.environment import masked_command
from helmsman.controller._scheduler.run_registry import (
    RUN_ID,
    UP,
    RunRecord,
    forget_run,
    log_dirs,
    read_runs,
)

log = logging.getLogger(__name__)

KEPT_RUNS = 20
KEPT_S = 14 * 86400.0
"""Retention of logs in the default place: the newest KEPT_RUNS runs, for KEPT_S seconds after their
last change.
"""

_END_S = 5.0
_UP_FOLDER = re.compile(rf"hm-{RUN_ID.pattern}")


class LeftProcess(msgspec.Struct, frozen=True):
    pid: int
    started: int
    """Start time in clock ticks since boot, which identifies the process if its pid is reused."""
    run_id: str
    of: str
    """Worker that started the process, by name or as 'worker <pid>'; or 'forkserver' or 'ray'."""
    command: str


class Leftover(msgspec.Struct, frozen=True):
    run_id: str
    state: str
    """'alive', 'dead', 'unknown' (processes without a record) or 'ended' (only logs)."""
    record: RunRecord | None
    processes: list[LeftProcess]
    folders: list[str]
    """Folders of Ray's files of a `helmsman up`, without logs."""
    logs: list[str] = []
    """Removable log directories in the default place."""


def leftovers(
    run_ids: Collection[str] = (), *, logs: bool = False, alive: Collection[str] = ()
) -> list[Leftover]:
    """Return the processes, folders and removable logs of this user's runs on this machine.

    Args:
        run_ids: Only these runs; all if empty.
        logs: List the logs of all ended runs, instead of those past their retention.
        alive: Runs that are known from other nodes to be alive.

    Returns:
        One entry per run, dead or alive.
    """
    # Read the records last: a run writes its record first, so every run found before has its record
    # by now.
    log_folders = log_dirs()
    processes: dict[str, list[LeftProcess]] = {}
    for process in _marked():
        processes.setdefault(process.run_id, []).append(process)
    records = {record.run_id: (record, lives) for record, lives in read_runs()}
    found = []
    for run_id in dict.fromkeys([*records, *processes]):
        record, lives = records.get(run_id, (None, False))
        state = "alive" if lives else "dead" if record is not None else "unknown"
        own = processes.get(run_id, [])
        found.append(Leftover(run_id, state, record, own, _up_folders(record)))
    living = {*alive, *(left.run_id for left in found if left.state != "dead")}
    removable = _removable_logs(log_folders, everything=logs, living=living)
    found = [msgspec.structs.replace(left, logs=removable.pop(left.run_id, [])) for left in found]
    found += [Leftover(run_id, "ended", None, [], [], paths) for run_id, paths in removable.items()]
    return [left for left in found if not run_ids or left.run_id in run_ids]


def _removable_logs(
    log_folders: Iterable[tuple[str, Path, float]], *, everything: bool, living: Collection[str]
) -> dict[str, list[str]]:
    """Return the default log directories, by run, that are past retention, or all.

    Logs of live runs are never included.
    """
    oldest = time.time() - KEPT_S
    found: dict[str, list[str]] = {}
    for index, (run_id, path, changed) in enumerate(log_folders):
        if run_id not in living and (everything or index >= KEPT_RUNS or changed < oldest):
            found.setdefault(run_id, []).append(str(path))
    return found


def remove_old_logs() -> None:
    if not _removable_logs(log_dirs(), everything=False, living=()):
        return  # before reading the process table, which is slower
    for left in leftovers():
        for problem in _remove_trees(left.logs):
            log.info("old logs stay: %s", problem)


def _remove_trees(paths: Iterable[str]) -> list[str]:
    """Remove directories; return one line per failure."""
    problems = []
    for path in paths:
        try:
            remove_tree(path)
        except FileNotFoundError:
            continue  # removed concurrently by another process
        except OSError as error:
            problems.append(f"{path} cannot be removed: {error}")
    return problems


def _up_folders(record: RunRecord | None) -> list[str]:
    """Return the folders for Ray's files of a ``helmsman up`` with this record.

    A folder without a record is kept: its run may be waiting for its head, with a record under
    another TMPDIR.
    """
    if record is None or record.scheduler != UP:
        return []
    folders = [up_folder(place, record.run_id) for place in up_places(os.environ)]
    return [str(folder) for folder in folders if is_own_directory(folder)]


def up_places(environ: Mapping[str, str]) -> list[Path]:
    """Return the candidate places for run folders of ``helmsman up``.

    It uses the first one below which Ray's socket paths are short enough.
    """
    named = (environ.get("RAY_TMPDIR"), tempfile.gettempdir(), "/tmp")
    places = [Path(os.path.abspath(each)) for each in named if each]
    # Programs on a run's cluster inherit that run's folder as RAY_TMPDIR.
    outer = (each.parent if _UP_FOLDER.fullmatch(each.name) else each for each in places)
    return list(dict.fromkeys(outer))


def up_folder(place: Path, run_id: str) -> Path:
    return place / f"hm-{run_id}"


def remove(left: Leftover) -> list[str]:
    """Remove the processes, folders, record and listed logs of a run.

    Returns:
        One line for each failure.
    """
    _end(left.processes)
    # Processes that were started in the meantime.
    later = [process for process in _marked() if process.run_id == left.run_id]
    _end(later)
    problems = [
        f"process {process.pid} ({process.command}) does not end; kill -9 {process.pid}"
        for process in dict.fromkeys([*left.processes, *later])
        if _lives(process)
    ]
    problems += _remove_trees([*left.folders, *left.logs])
    if (elsewhere := _elsewhere(left)) is not None:
        problems.append(
            f"{elsewhere} is not removed: it lies where neither RAY_TMPDIR nor TMPDIR points, and "
            "no path from a record is "
            f"trusted. RAY_TMPDIR={elsewhere.parent} helmsman clean --run {left.run_id} removes it"
        )
    if not problems and left.record is not None:
        forget_run(left.run_id)
    return problems


def _elsewhere(left: Leftover) -> Path | None:
    """Return the folder of a ``helmsman up`` that was started with another RAY_TMPDIR."""
    if left.record is None or left.record.scheduler != UP:
        return None
    path = Path(left.record.log_dir)
    is_left = (
        path == up_folder(path.parent, left.run_id)
        and str(path) not in left.folders
        and is_own_directory(path)
    )
    return path if is_left else None


def _marked() -> Iterator[LeftProcess]:
    for row in process_table().values():
        # Other users control their marks and environments, so their processes are ignored.
        if row.state == "Z" or row.pid == os.getpid() or uid_of(row.pid) != os.getuid():
            continue
        with contextlib.suppress(OSError):  # the process has exited
            run_id, _, of = _tag_of(row.pid).partition("/")
            if (mark := mark_of(row.pid)) is not None and mark.run_id != run_id:
                run_id = mark.run_id
                of = f"worker {mark.worker_pid}" if mark.worker_pid else "forkserver"
            if run_id:
                content = Path(f"/proc/{row.pid}/cmdline").read_bytes()
                command = masked_command(content.decode(errors="replace").split("\0")).strip()
                worker_id = "/".join(of.split("/")[:2])  # of 'role/index/token'
                yield LeftProcess(row.pid, row.started, run_id, worker_id, command[:120])


def _tag_of(pid: int) -> str:
    """Return the tag in the environment of a process; '' if absent or not readable."""
    name = f"{TAG_VARIABLE}=".encode()
    with contextlib.suppress(PermissionError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(name):
                return entry[len(name) :].decode(errors="replace")
    return ""


def _end(processes: Sequence[LeftProcess]) -> None:
    for process in processes:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            pidfd = os.pidfd_open(process.pid)  # a reused pid cannot be hit
            stack.callback(os.close, pidfd)
            if _lives(process):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    wait_until(lambda: not any(map(_lives, processes)), _END_S)


def _lives(process: LeftProcess) -> bool:
    row = process_of(process.pid)
    return row is not None and row.started == process.started and row.state != "Z"


def age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def describe(left: Leftover) -> list[str]:
    record, who = left.record, ""
    if record is not None:
        who = f", controller {record.pid} on {record.host} ({record.command[:80]}), "
        who += f"{age(time.time() - record.since)} ago"
    return [
        f"run {left.run_id}: {left.state}{who}",
        *(f"  process {each.pid} of {each.of}: {each.command}" for each in left.processes),
        *(f"  folder {folder}" for folder in left.folders),
        *(f"  logs {path}" for path in left.logs),
    ]
