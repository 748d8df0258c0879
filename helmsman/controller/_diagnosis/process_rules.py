"""Rules about processes and nodes: stopped, stuck, dead, swapped, silent, or out of space."""

from __future__ import annotations

from collections.abc import Iterator

from helmsman.api.run_state import NodeReport
from helmsman.controller._diagnosis.evidence import Evidence, Finding, WorkerEvidence, seconds
from helmsman.controller._diagnosis.stacks import named, place, site_of

_STUCK_S = 2.0
_NODE_S = 5.0
"""Nodes of `helmsman up` that are not there are a finding after this time."""
_LOW_SHARE, _LOW_BYTES = 0.005, 64 << 20
_LOW_MEMORY_BYTES = 256 << 20
_SWAPPED_SHARE = 0.2
_CLOCK_S = 5.0
_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "a zombie", "gone": "gone"}


def script_process(evidence: Evidence) -> Iterator[Finding]:
    """The script's process is stopped, stuck or a zombie."""
    run = evidence.now
    if run.answered_by != "observation":
        return
    since_s = run.script_stuck_s
    stack = run.script.stacks[0] if run.script and run.script.stacks else None
    site = site_of(stack) if stack is not None else None
    shown = [f"its stack: {place(site)}"] if site is not None else []
    if run.script_state in _STATES:
        yield Finding(
            rule="script stopped",
            is_problem=True,
            subject="script",
            cause=f"The script's process {run.pid} is {_STATES[run.script_state]}.",
            since_s=since_s,
            next_step=f"kill -CONT {run.pid} lets it continue."
            if run.script_state == "T"
            else "Attach to or end the process that holds it.",
        )
    elif since_s is not None and since_s < _STUCK_S:
        yield Finding(
            rule="script silent",
            is_problem=True,
            subject="script",
            cause=f"The script's process {run.pid} runs, but does not answer on its control "
            "socket.",
            evidence=shown,
            next_step="Ask again; it may have too many threads or open files.",
        )
    else:
        doing = {"R": "computes", "D": "waits for a disk or for swapped memory"}
        yield Finding(
            rule="interpreter stuck",
            is_problem=True,
            subject="script",
            cause=f"The script's interpreter does not run Python; its process {run.pid} "
            f"{doing.get(run.script_state, 'sleeps')} in C code that holds the interpreter lock.",
            evidence=shown,
            since_s=since_s,
            next_step=f"py-spy dump --native --pid {run.pid} shows the C function.",
        )


def supervised_node(evidence: Evidence) -> Iterator[Finding]:
    """A node of `helmsman up` waits for others, has lost the head, or has a stopped process."""
    run, node = evidence.now, evidence.now.node
    if node is None:
        return
    here = f"rank {node.rank} of {node.count}"
    for name, (pid, state) in node.processes.items():
        if state in _STATES:
            yield Finding(
                rule="process stopped",
                is_problem=True,
                subject=name,
                cause=f"The {name} of {here} is {_STATES[state]}: process {pid} on {run.host}.",
                next_step=f"kill -CONT {pid} lets it continue."
                if state == "T"
                else f"Look at the output of helmsman up on {run.host}.",
            )
    if node.since_s < _NODE_S or not (node.is_apart or node.missing):
        return
    reason = f"{node.head} does not answer" if node.is_apart else node.missing
    yield Finding(
        rule="head unreachable" if node.is_apart else "nodes missing",
        is_problem=True,
        subject=node.head if node.is_apart else here,
        cause=f"{here} on {run.host} {node.doing}: {reason}.",
        since_s=node.since_s,
        next_step="Look at the output of helmsman up on these nodes; --timeout gives them longer.",
    )


def event_loop(evidence: Evidence) -> Iterator[Finding]:
    """A callback or coroutine of the script blocks Helmsman's event loop."""
    run = evidence.now
    if run.loop_stack is None:
        return
    site = site_of(run.loop_stack)
    at = f" at {place(site)}" if site is not None else ""
    yield Finding(
        rule="event loop blocked",
        is_problem=True,
        subject="script",
        workers=[each.worker_id for each in run.workers],
        cause=f"A callback or coroutine blocks Helmsman's event loop{at}, so that no worker can be "
        "asked and no call ends.",
        evidence=[f"its stack: {each}" for each in run.loop_stack.frames[-4:]],
        next_step="Run it in a thread: await asyncio.to_thread(...); callbacks of futures must "
        "return at once.",
    )


def worker_processes(evidence: Evidence) -> Iterator[Finding]:
    """A worker's process is stopped, a zombie, dead, or its interpreter is stuck."""
    for worker in evidence.workers:
        now, health = worker.now, worker.now.health
        calls = (
            f"; open calls: {', '.join(each.name for each in now.calls[:4])}" if now.calls else ""
        )
        if now.process_state in ("Z", "gone") or now.state == "failed":
            how = now.error or f"its process {now.pid} is {_STATES.get(now.process_state, 'dead')}"
            yield Finding(
                rule="worker dead",
                is_problem=True,
                subject=worker.id,
                workers=[worker.id],
                cause=f"{worker.id} is dead: it {how}{calls}."
                if now.error
                else f"{worker.id} is dead: {how}{calls}.",
                next_step=f"helmsman logs shows its last output ({now.log_path}).",
            )
            continue
        if health is None or health.stuck_s is None or health.stuck_s < _STUCK_S:
            continue
        running = f", during {health.running}" if health.running else ""
        if health.process_state == "stopped":
            yield Finding(
                rule="worker stopped",
                is_problem=True,
                subject=worker.id,
                workers=[worker.id],
                cause=f"{worker.id} is stopped: its process {health.pid} on {now.node} received "
                f"SIGSTOP or is held by a debugger{running}{calls}.",
                since_s=health.stuck_s,
                next_step=f"kill -CONT {health.pid} on {now.node} lets it continue.",
            )
        else:
            site = site_of(worker.stack) if worker.stack is not None else None
            state = {
                "running": "computes in C code that holds the interpreter lock",
                "disk": "waits for a disk or for swapped memory",
            }.get(health.process_state or "", "sleeps in C code that holds the interpreter lock")
            yield Finding(
                rule="interpreter stuck",
                is_problem=True,
                subject=worker.id,
                workers=[worker.id],
                cause=f"{worker.id} does not run Python: its process {health.pid} on {now.node} "
                f"{state}{running}{calls}.",
                evidence=[f"its stack: {place(site)}"] if site is not None else [],
                since_s=health.stuck_s,
                next_step=f"py-spy dump --native --pid {health.pid} shows the C function.",
            )


def silent_nodes(evidence: Evidence) -> Iterator[Finding]:
    """No worker of a node answers or can be observed."""
    by_node: dict[str, list[WorkerEvidence]] = {}
    for worker in evidence.workers:
        if worker.now.state in ("ready", "overdue"):
            by_node.setdefault(worker.now.node, []).append(worker)
    for node, workers in by_node.items():
        silent = [
            each for each in workers if each.now.health is None and not each.now.process_state
        ]
        if not silent:
            continue
        names = named(each.id for each in silent)
        is_node = len(silent) == len(workers) and len(by_node) > 1
        yield Finding(
            rule="node silent" if is_node else "worker silent",
            is_problem=True,
            subject=node if is_node else names,
            workers=[each.id for each in silent],
            cause=f"Node {node} is silent: none of its workers ({names}) answers."
            if is_node
            else f"{names} on node {node} does not answer and cannot be observed.",
            evidence=sorted({each.now.error for each in silent if each.now.error}),
            next_step=f"Check that {node} is up and reachable from the script's node.",
        )


def nodes(evidence: Evidence) -> Iterator[Finding]:
    """A disk, shared memory or memory is full, or a clock was set."""
    run = evidence.now
    reports: dict[str, tuple[NodeReport, float]] = {}
    for worker in run.workers:
        if worker.report is not None:
            reports[worker.node] = worker.report.node, worker.report.clock_jump_s
    if run.script is not None:
        own = run.script.node.node or f"the script's node {run.host}"
        reports.setdefault(own, (run.script.node, 0.0))
    for node, (report, _) in reports.items():
        for path, (free, total) in report.disks.items():
            if total and (free < _LOW_BYTES or free < _LOW_SHARE * total):
                yield Finding(
                    rule="disk full",
                    is_problem=True,
                    subject=node,
                    cause=f"{path} on {node} is full: {free >> 20} MiB of {total >> 20} MiB "
                    "are free.",
                    next_step=f"Free space in {path}; du -xh {path} | sort -h shows the largest "
                    "entries.",
                )
        if 0 < report.memory_available < _LOW_MEMORY_BYTES:
            yield Finding(
                rule="memory full",
                is_problem=True,
                subject=node,
                cause=f"{node} has {report.memory_available >> 20} MiB of memory left.",
                next_step="Reduce batch or cache sizes, or the number of workers on the node.",
            )
    for worker in run.workers:
        if worker.report is None:
            continue
        resident = worker.report.rss_bytes + worker.report.swap_bytes
        if worker.report.swap_bytes > max(_SWAPPED_SHARE * resident, _LOW_BYTES):
            yield Finding(
                rule="swapping",
                is_problem=True,
                subject=worker.worker_id,
                workers=[worker.worker_id],
                cause=f"{worker.report.swap_bytes >> 20} MiB of {worker.worker_id} on "
                f"{worker.node} are swapped out.",
                next_step="Reduce the memory of the node's processes.",
            )
    jumps = {node: jump_s for node, (_, jump_s) in reports.items() if abs(jump_s) > _CLOCK_S}
    if run.script is not None and abs(run.script.clock_jump_s) > _CLOCK_S:
        jumps[run.host] = run.script.clock_jump_s
    for node, jump_s in jumps.items():
        ahead = "ahead" if jump_s > 0 else "back"
        yield Finding(
            rule="clock set",
            is_problem=True,
            subject=node,
            cause=f"The clock of {node} was set {ahead} by {seconds(abs(jump_s))} during the run.",
            next_step="Helmsman's own limits use a monotonic clock; check code that uses "
            "time.time(), certificates and tokens.",
        )
