"""What runs have left behind whose controller was killed: found by their mark or tag, and removed.

Every process that a run causes on a machine is the forkserver, a worker, Ray's own, or was started below one of these. It bears
the run's id in its mark (see guardian.py) or in the environment with which it was started. A run counts as dead when its record
is there and not locked.
Processes of a run without a record belong to a controller on another machine, or one whose record was removed: they are
listed, and ended only when the run is named.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from helmsman.controller.runs import UP, RunRecord, forget_run, read_runs, user_dir
from helmsman.rpc_server.guardian import TAG_VARIABLE, mark_of, process_table, wait_until

_END_S = 5.0
_RUN_FOLDER = re.compile(r"helmsman-([0-9a-f]{10})-\w+")


class LeftProcess(msgspec.Struct, frozen=True):
    """A process of a run."""

    pid: int
    started: int
    """Clock ticks since boot, which tells it from a successor of its pid."""
    run_id: str
    of: str
    """The worker below which it was started, by name or by 'worker <pid>'; 'forkserver' or 'ray'."""
    command: str


class Leftover(msgspec.Struct, frozen=True):
    """What is left of a run on this machine."""

    run_id: str
    state: str
    """alive, dead, or unknown where there are processes and no record."""
    record: RunRecord | None
    processes: list[LeftProcess]
    folders: list[str]
    """Sockets and the like; not the logs."""


def leftovers(run_ids: Collection[str] = ()) -> list[Leftover]:
    """What there is of the runs of this user on this machine, dead and alive; of ``run_ids`` alone where given."""
    records = {record.run_id: (record, alive) for record, alive in read_runs()}
    processes: dict[str, list[LeftProcess]] = {}
    for process in _marked():
        processes.setdefault(process.run_id, []).append(process)
    folders = _folders()
    found = []
    for run_id in dict.fromkeys([*records, *processes, *folders]):
        if run_ids and run_id not in run_ids:
            continue
        record, alive = records.get(run_id, (None, False))
        state = "alive" if alive else "dead" if record is not None or run_id not in processes else "unknown"
        own = [record.log_dir] if record is not None and record.scheduler == UP and os.path.exists(record.log_dir) else []
        found.append(Leftover(run_id, state, record, processes.get(run_id, []), folders.get(run_id, []) + own))
    return found


def _folders() -> dict[str, list[str]]:
    """This user's folders of sockets, by run. One without record and processes is nobody's: a run writes its record first."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(tempfile.gettempdir()).glob("helmsman-*")):
        match = _RUN_FOLDER.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if match and path.stat().st_uid == os.getuid():
                found.setdefault(match.group(1), []).append(str(path))
    return found


def remove(left: Leftover, *, logs: bool = False) -> list[str]:
    """End the processes of a run and remove its folders and record; returns what could not be, a line each.

    Args:
        logs: remove its logs, too, where they are in the default place.
    """
    problems: list[str] = []
    targets = {process.pid: process for process in left.processes}
    for process in targets.values():
        _kill(process)
    wait_until(lambda: not any(map(_lives, targets.values())), _END_S)
    # What a process started while it was being ended bears the mark or tag, too.
    for process in _marked():
        if process.run_id == left.run_id:
            _kill(process)
            targets[process.pid] = process
    wait_until(lambda: not any(map(_lives, targets.values())), _END_S)
    problems += [
        f"process {process.pid} ({process.command}) does not end; kill -9 {process.pid}"
        for process in targets.values()
        if _lives(process)
    ]
    for folder in left.folders:
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.exists(folder):
            problems.append(f"{folder} cannot be removed; rm -r {folder}")
    if logs and left.record is not None and Path(left.record.log_dir) == user_dir() / left.run_id:
        shutil.rmtree(left.record.log_dir, ignore_errors=True)
    if not problems:
        forget_run(left.run_id)
    return problems


def _marked() -> Iterator[LeftProcess]:
    for row in process_table().values():
        if row.state == "Z" or row.pid == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has gone meanwhile, or is another user's
            run_id, _, of = _tag_of(row.pid).partition("/")
            if (mark := mark_of(row.pid)) is not None and mark.run_id != run_id:
                run_id, of = mark.run_id, f"worker {mark.worker_pid}" if mark.worker_pid else "forkserver"
            if run_id and os.stat(f"/proc/{row.pid}").st_uid == os.getuid():
                command = Path(f"/proc/{row.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                yield LeftProcess(row.pid, row.started, run_id, _worker_of(of), command[:120])


def _tag_of(pid: int) -> str:
    """The tag in the environment of a process; '' without one."""
    name = f"{TAG_VARIABLE}=".encode()
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(name):
            return entry[len(name) :].decode()
    return ""


def _worker_of(mark: str) -> str:
    """'role/index' of 'role/index/token'."""
    return "/".join(mark.split("/")[:2])


def _kill(process: LeftProcess) -> None:
    """Through a pidfd, so that a successor of the pid cannot be hit."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if _lives(process):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return
    finally:
        os.close(pidfd)


def _lives(process: LeftProcess) -> bool:
    row = process_table().get(process.pid)
    return row is not None and row.started == process.started and row.state != "Z"


def age(seconds: float) -> str:
    """A duration for people."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def describe(left: Leftover) -> list[str]:
    """Lines for people."""
    record = left.record
    who = (
        f", controller {record.pid} on {record.host} ({record.command[:80]}), {age(time.time() - record.since)} ago"
        if record
        else ""
    )
    return [
        f"run {left.run_id}: {left.state}{who}",
        *(f"  process {process.pid} of {process.of}: {process.command}" for process in left.processes),
        *(f"  folder {folder}" for folder in left.folders),
    ]
