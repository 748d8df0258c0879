"""Rules about processes and nodes: stopped, stuck, dead, swapped, silent, or out of space."""

from __future__ import annotations

from collections.abc import Iterator

from helmsman._desk.evidence import (
    STATES,
    Evidence,
    Finding,
    WorkerEvidence,
    seconds,
)
from helmsman._desk.stacks import at, named, place, site_of
from helmsman.api.run_state import ProcessReport, StackTrace

_STUCK_S = 2.0
_NODE_S = 5.0
"""Nodes of `helmsman up` that are not there are a finding after this time."""
_LOW_SHARE, _LOW_BYTES = 0.005, 64 << 20
_LOW_MEMORY_BYTES = 256 << 20
_LEAST_PAUSES, _PAUSED_S = 2, 3.0
_SWAPPED_SHARE = 0.2
_CLOCK_S = 5.0
_HALTED = ("T", "t", "Z", "gone")
_IN_C = {
    "running": "computes in C code that holds the interpreter lock",
    "disk": "waits for a disk or for swapped memory",
    "sleeping": "sleeps in C code that holds the interpreter lock",
}
"""State of a process whose interpreter is stuck -> its description."""


def script_process(evidence: Evidence) -> Iterator[Finding]:
    """The script's process is stopped, stuck or a zombie."""
    run = evidence.now
    if run.answered_by != "observation":
        return
    since_s, state = run.script_stuck_s, run.script_state
    stack = run.script.stacks[0] if run.script and run.script.stacks else None
    process = f"The script's process {run.pid}"
    if state in _HALTED:
        step = "Attach to or end the process that holds it."
        step = _continue(run.pid) if state == "T" else step
        cause = f"{process} is {STATES[state]}."
        yield Finding("script stopped", "script", cause, step, since_s=since_s)
    elif since_s is not None and since_s < _STUCK_S:
        cause = f"{process} runs, but does not answer on its control socket."
        step = "Ask again; it may have too many threads or open files."
        yield Finding("script silent", "script", cause, step, evidence=_shown(stack))
    else:
        doing = _IN_C[{"R": "running", "D": "disk"}.get(state, "sleeping")]
        yield _stuck(
            "script", run.pid, f"{process} does not run Python: it {doing}.", stack, since_s
        )


def paused_processes(evidence: Evidence) -> Iterator[Finding]:
    """A process is stopped and continued again and again."""
    found = [(each.id, each.now.report) for each in evidence.workers]
    for id_, report in [("script", evidence.now.script), *found]:
        pauses_s = report.pauses_s if report is not None else []
        if report is None or len(pauses_s) < _LEAST_PAUSES or sum(pauses_s) < _PAUSED_S:
            continue
        cause = f"{id_} is stopped and continued again and again: its process {report.pid} was "
        cause += f"stopped {len(pauses_s)} times in the last half minute, for "
        cause += f"{seconds(sum(pauses_s))} in all."
        step = "Look for the program that sends SIGSTOP, and for a freezer of its container."
        yield Finding("process paused", id_, cause, step, [id_] if id_ != "script" else [])


def _continue(pid: int | None, where: str = "") -> str:
    return f"kill -CONT {pid}{where} lets it continue."


def _shown(stack: StackTrace | None) -> list[str]:
    return [f"its stack: {place(site)}"] if (site := site_of(stack)) is not None else []


def _stuck(
    subject: str, pid: int | None, cause: str, stack: StackTrace | None, since_s: float | None
) -> Finding:
    step = f"py-spy dump --native --pid {pid} shows the C function."
    workers = [] if subject == "script" else [subject]
    return Finding("interpreter stuck", subject, cause, step, workers, _shown(stack), since_s)


def supervised_node(evidence: Evidence) -> Iterator[Finding]:
    """A node of `helmsman up` waits for others, or has a stopped process."""
    run, node = evidence.now, evidence.now.node
    if node is None:
        return
    here = f"rank {node.rank} of {node.count}"
    for name, (pid, state) in node.processes.items():
        if state in _HALTED:
            step = f"Look at the output of helmsman up on {run.host}."
            step = _continue(pid) if state == "T" else step
            cause = f"The {name} of {here} is {STATES[state]}: process {pid} on {run.host}."
            yield Finding("process stopped", name, cause, step)
    if node.since_s >= _NODE_S and node.missing:
        step = "Look at the output of helmsman up on these nodes; --timeout gives them longer."
        cause = f"{here} on {run.host} {node.doing}: {node.missing}."
        yield Finding("nodes missing", here, cause, step, since_s=node.since_s)


def event_loop(evidence: Evidence) -> Iterator[Finding]:
    """A callback or coroutine of the script blocks Helmsman's event loop."""
    run = evidence.now
    if (stack := run.loop_stack) is not None:
        cause = f"A callback or coroutine blocks Helmsman's event loop{at(stack)}, so that no "
        cause += "worker can be asked and no call ends."
        step = "Run it in a thread: await asyncio.to_thread(...); callbacks of futures must return "
        step += "at once."
        ids = [each.worker_id for each in run.workers]
        shown = [f"its stack: {place(each)}" for each in stack.frames[-4:]]
        yield Finding("event loop blocked", "script", cause, step, ids, shown)


def worker_processes(evidence: Evidence) -> Iterator[Finding]:
    """A worker's process is stopped, a zombie, dead, or its interpreter is stuck."""
    for worker in evidence.workers:
        now, health, id_ = worker.now, worker.now.health, worker.id
        calls = ", ".join(each.name for each in now.calls[:4])
        calls = f"; open calls: {calls}" if calls else ""
        if now.process_state in ("Z", "gone") or now.state == "failed":
            how = f"its process {now.pid} is {STATES.get(now.process_state, 'dead')}"
            cause = f"{id_} is dead: {f'it {now.error}' if now.error else how}{calls}."
            step = f"helmsman logs shows its last output ({now.log_path})."
            yield Finding("worker dead", id_, cause, step, [id_])
            continue
        if health is None or health.stuck_s is None or health.stuck_s < _STUCK_S:
            continue
        rest = f"{f', during {health.running}' if health.running else ''}{calls}."
        process = f"its process {health.pid} on {now.node}"
        if health.process_state == "stopped":
            cause = f"{id_} is stopped: {process} received SIGSTOP or is held by a debugger{rest}"
            step = _continue(health.pid, f" on {now.node}")
            yield Finding("worker stopped", id_, cause, step, [id_], since_s=health.stuck_s)
        else:
            doing = _IN_C.get(health.process_state or "", _IN_C["sleeping"])
            cause = f"{id_} does not run Python: {process} {doing}{rest}"
            yield _stuck(id_, health.pid, cause, worker.stack, health.stuck_s)


def silent_nodes(evidence: Evidence) -> Iterator[Finding]:
    """No worker of a node answers or can be observed."""
    by_node: dict[str, list[WorkerEvidence]] = {}
    for worker in evidence.workers:
        if worker.now.state in ("ready", "overdue"):
            by_node.setdefault(worker.now.node, []).append(worker)
    for node, workers in by_node.items():
        silent = [e for e in workers if e.now.health is None and not e.now.process_state]
        if not silent:
            continue
        rule, subject = "worker silent", named(each.id for each in silent)
        cause = f"{subject} on node {node} does not answer and cannot be observed."
        if len(silent) == len(workers) and len(by_node) > 1:
            cause = f"Node {node} is silent: none of its workers ({subject}) answers."
            rule, subject = "node silent", node
        step = f"Check that {node} is up and reachable from the script's node."
        errors = sorted({each.now.error for each in silent if each.now.error})
        yield Finding(rule, subject, cause, step, [each.id for each in silent], errors)


def nodes(evidence: Evidence) -> Iterator[Finding]:
    """A disk, shared memory or memory is full, or a clock was set."""
    run = evidence.now
    reports: dict[str, ProcessReport] = {}
    for worker in run.workers:
        report = worker.report
        if report is None:
            continue
        reports[worker.node] = report
        swapped = report.swap_bytes
        if swapped > max(_SWAPPED_SHARE * (report.rss_bytes + swapped), _LOW_BYTES):
            cause = f"{swapped >> 20} MiB of {worker.worker_id} on {worker.node} are swapped out."
            step = "Reduce the memory of the node's processes."
            yield Finding("swapping", worker.worker_id, cause, step, [worker.worker_id])
    if run.script is not None:
        reports.setdefault(run.script.node or f"the script's node {run.host}", run.script)
    for node, state in reports.items():
        for path, (free, total) in state.disks.items():
            if total and free < max(_LOW_BYTES, _LOW_SHARE * total):
                cause = f"{path} on {node} is full: {free >> 20} MiB of {total >> 20} MiB are free."
                step = f"Free space in {path}; du -xh {path} | sort -h shows the largest entries."
                yield Finding("disk full", node, cause, step)
        if 0 < state.memory_available < _LOW_MEMORY_BYTES:
            cause = f"{node} has {state.memory_available >> 20} MiB of memory left."
            step = "Reduce batch or cache sizes, or the number of workers on the node."
            yield Finding("memory full", node, cause, step)
        if abs(jump_s := state.clock_jump_s) > _CLOCK_S:
            set_by = f"{'ahead' if jump_s > 0 else 'back'} by {seconds(abs(jump_s))}"
            cause = f"The clock of {node} was set {set_by} during the run."
            step = "Helmsman's own limits use a monotonic clock; check code that uses time.time(), "
            step += "certificates and tokens."
            yield Finding("clock set", node, cause, step)
