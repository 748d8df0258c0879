"""Observation of a run's processes on this machine, without their cooperation."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import msgspec

from helmsman._process.guardian import mark_of, process_of, process_table, run_members
from helmsman._process.pulse import Seen, observe, pages_of, read
from helmsman._process.stack_dump import dump_stacks
from helmsman.api.observer import SCRIPT
from helmsman.api.run_state import ProcessReport, RunSnapshot, WorkerSnapshot
from helmsman.api.workers import WorkerHealth
from helmsman.controller._scheduler.run_registry import RunRecord
from helmsman.controller._scheduler.transport.health import as_health
from helmsman.rpc_server._host.examination import node_facts

_STUCK_S = 1.0


def is_stuck(record: RunRecord) -> bool:
    """Return whether the script's interpreter has not run Python for a second."""
    seen = _seen(record)
    return seen is not None and seen.stuck_s > _STUCK_S


def _seen(record: RunRecord) -> Seen | None:
    page = pages_of(record.pid, record.run_id).get(SCRIPT)
    return read(observe(page, record.pid)) if page is not None else None


def observe_run(record: RunRecord, *, reports: bool) -> RunSnapshot:
    """Return a snapshot of a run of this machine whose script does not answer."""
    script, seen = process_of(record.pid), _seen(record)
    state = "gone" if script is None else seen.state if seen is not None else script.state
    is_read = reports and script is not None
    pids = run_members(record.run_id)
    return record.snapshot(
        "observation",
        script=observed_report(record.pid, record.log_dir, seen) if is_read else None,
        script_stuck_s=seen.stuck_s if seen is not None else None,
        script_state=state,
        workers=observe_workers(pids, record.host, record.log_dir, reports=reports),
    )


def observe_workers(
    pids: Iterable[int], host: str, log_dir: str, *, reports: bool
) -> list[WorkerSnapshot]:
    """Return the workers among these processes of this machine, of any run.

    ``host`` is the node of a worker that does not describe itself.
    """
    table, found = process_table(), dict[str, WorkerSnapshot]()
    # A forked child has its parent's page, too; the parent started first.
    for pid in sorted(pids, key=lambda each: table[each].started if each in table else 0):
        mark = mark_of(pid)
        for worker_id, page in pages_of(pid, mark.run_id).items() if mark is not None else ():
            if worker_id == SCRIPT or worker_id in found:
                continue
            seen = read(observe(page, pid))
            health = as_health(seen) if seen is not None else None
            if health is not None and seen is not None and seen.stuck_s < _STUCK_S:
                # A recent beat counts as an answer.
                health = msgspec.structs.replace(health, stuck_s=None, process_state=None)
            found[worker_id] = WorkerSnapshot(
                worker_id=worker_id,
                role=worker_id.rpartition("/")[0],
                node=health.node if health is not None else host,
                pid=pid,
                state="unknown",
                log_path="",
                process_state=seen.state if seen is not None else "gone",
                health=health,
                report=observed_report(pid, log_dir, seen) if reports else None,
            )
    sizes = collections.Counter(each.role for each in found.values())
    # By rank: the ids of a role differ in their numbers only.
    in_order = sorted(found.values(), key=lambda e: (e.role, len(e.worker_id), e.worker_id))
    return [msgspec.structs.replace(each, world_size=sizes[each.role]) for each in in_order]


def complete(snapshot: RunSnapshot, *, reports: bool) -> RunSnapshot:
    """Add observations of the workers on this machine that did not answer the script."""
    workers = [_completed(snapshot, each, reports=reports) for each in snapshot.workers]
    return msgspec.structs.replace(snapshot, workers=workers)


def _completed(run: RunSnapshot, worker: WorkerSnapshot, *, reports: bool) -> WorkerSnapshot:
    health, pid = worker.health, worker.pid
    is_silent = health is None or (health.stuck_s or 0.0) > _STUCK_S
    if not is_silent or pid is None or worker.report is not None:
        return worker
    mark, process = mark_of(pid), process_of(pid)
    if mark is None or mark.run_id != run.run_id:
        return worker  # it runs on another machine, or another process has its pid now
    state, report = process.state if process is not None else "gone", None
    if reports and state not in ("Z", "gone"):
        report = observed_report(pid, run.log_dir, health)
        if report.stacks and health is not None and health.running is not None:
            # The first thread has the interpreter.
            report.stacks[0] = msgspec.structs.replace(
                report.stacks[0], thread="engine", call=health.running, running_s=health.running_s
            )
    return msgspec.structs.replace(worker, process_state=state, report=report)


def observed_report(
    pid: int, log_dir: str, seen: Seen | WorkerHealth | None = None
) -> ProcessReport:
    """Report on a process of this machine from outside, and by what its page shows."""
    return ProcessReport(
        pid=pid,
        cpu_s=seen.cpu_s if seen is not None else 0.0,
        rss_bytes=seen.rss_bytes if seen is not None else 0,
        stacks=dump_stacks(pid),
        **node_facts(log_dir),
    )
