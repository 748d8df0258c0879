"""Texts of `helmsman status`, `stacks` and `why`."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence

from helmsman.api.plan import aligned
from helmsman.api.run_state import RolloutSnapshot, RunSnapshot, StackTrace, WorkerSnapshot
from helmsman.controller._diagnosis.diagnosis import Diagnosis
from helmsman.controller._diagnosis.evidence import Finding, seconds
from helmsman.controller._diagnosis.stacks import (
    describe_wait,
    grouped,
    named,
    place,
    site_of,
    wait_of,
)
from helmsman.controller._node.observation import size

_MOST_ROWS = 40
"""With more workers, a row stands for the workers of a role with the same state and call."""


def is_healthy(run: RunSnapshot) -> bool:
    """Return whether the script, or the node's supervisor, and all workers answer."""
    stopped = run.node is not None and any(s in "TtZ" for _, s in run.node.processes.values())
    apart = run.node is not None and run.node.is_apart
    return (
        run.answered_by != "observation"
        and not (stopped or apart)
        and all(
            each.state in ("ready", "restarting", "unknown")
            and each.health is not None
            and each.health.answered
            for each in run.workers
        )
    )


def status_text(run: RunSnapshot, earlier: RunSnapshot | None = None) -> str:
    """Format a run on one screen.

    Args:
        run: The run.
        earlier: A snapshot before it, for rates; rates are those since the start when None.
    """
    age_s = max(run.taken_at - run.started_at, 0.0)
    lines = [
        f"run {run.run_id}  {run.scheduler}  up {seconds(age_s)}  pid {run.pid} on {run.host}",
        f"script: {run.command}",
    ]
    if run.node is not None:
        node = run.node
        lines.append(f"rank {node.rank} of {node.count} {node.doing} ({seconds(node.since_s)})")
        lines += [f"missing: {node.missing}"] if node.missing else []
        lines += [f"head: {node.head}"] if node.head else []
        lines += [f"{name}: pid {pid}, {state}" for name, (pid, state) in node.processes.items()]
    if run.answered_by == "observation":
        stuck = f" for {seconds(run.script_stuck_s)}" if run.script_stuck_s is not None else ""
        lines.append(
            f"THE SCRIPT DOES NOT ANSWER{stuck}; its process is in state {run.script_state}"
        )
    if run.facts:
        lines.append("  ".join(f"{name} {value}" for name, value in run.facts.items()))
    for phase in run.phases:
        usual = f"; median {seconds(phase.median_s)}" if phase.median_s is not None else ""
        lines.append(
            f"phase: {phase.kind} {phase.detail}".rstrip() + f" ({seconds(phase.age_s)}{usual})"
        )
    lines += ["", aligned(_worker_rows(run.workers))]
    for rollout in run.rollouts:
        before = [each for each in earlier.rollouts if each.role == rollout.role] if earlier else []
        apart_s = run.taken_at - earlier.taken_at if earlier is not None and before else age_s
        lines += ["", *_rollout_lines(rollout, before[0] if before else None, apart_s)]
    return "\n".join(lines)


def _worker_rows(workers: Sequence[WorkerSnapshot]) -> list[tuple[str, ...]]:
    head = ("worker", "state", "node", "devices", "call", "for", "median", "memory", "restarts")
    if len(workers) <= _MOST_ROWS:
        return [head, *(_row(each.worker_id, [each]) for each in workers)]
    groups: dict[tuple[str, str, str], list[WorkerSnapshot]] = {}
    for each in workers:
        groups.setdefault((each.role, _state(each), _call(each)), []).append(each)
    return [head, *(_row(named(e.worker_id for e in group), group) for group in groups.values())]


def _row(name: str, workers: Sequence[WorkerSnapshot]) -> tuple[str, ...]:
    first = max(workers, key=lambda each: each.calls[0].age_s if each.calls else 0.0)
    call = first.calls[0] if first.calls else None
    nodes = {each.node for each in workers}
    # Inline workers share a process.
    sizes = {(e.node, e.pid): e.health.rss_bytes for e in workers if e.health is not None}
    memory = sum(sizes.values())
    more = f" and {len(first.calls) - 1} more" if len(first.calls) > 1 else ""
    return (
        name,
        _state(first),
        first.node if len(nodes) == 1 else f"{len(nodes)} nodes",
        ",".join(first.devices) if len(workers) == 1 else str(sum(len(e.devices) for e in workers)),
        _call(first) + more,
        seconds(call.age_s) if call is not None else "",
        seconds(call.median_s) if call is not None and call.median_s is not None else "",
        size(memory) if memory else "",
        str(sum(each.num_restarts for each in workers) or ""),
    )


def _state(worker: WorkerSnapshot) -> str:
    health = worker.health
    if worker.state in ("failed", "stopped", "restarting"):
        return worker.state
    if worker.process_state in ("Z", "gone"):
        return "dead"
    if health is None:
        return "silent"
    if not health.answered:
        return f"stuck ({health.process_state or 'sleeping'})"
    if worker.state == "overdue":
        return "overdue"
    return "busy" if worker.calls or health.running or health.async_running else "idle"


def _call(worker: WorkerSnapshot) -> str:
    if worker.calls:
        return worker.calls[0].name.rpartition(".")[2]
    return (worker.health.running or "").rpartition(".")[2] if worker.health is not None else ""


def _rollout_lines(
    rollout: RolloutSnapshot, before: RolloutSnapshot | None, apart_s: float
) -> list[str]:
    num_tokens = rollout.num_tokens_done - (before.num_tokens_done if before is not None else 0)
    version = "none" if rollout.version is None else str(rollout.version)
    median = f", median {seconds(rollout.median_s)}" if rollout.median_s is not None else ""
    states = collections.Counter(rollout.instances.values())
    paused = (
        f"; paused by {', '.join(p or 'pause()' for p in rollout.paused_by)}"
        if rollout.paused_by
        else ""
    )
    lines = [
        f"{rollout.role}: {rollout.num_queued} queued, {rollout.num_in_flight} in flight, "
        f"{rollout.num_done} done{median}; {num_tokens / max(apart_s, 0.001):.0f} tokens/s; "
        f"weight version {version}; instances: "
        + ", ".join(f"{number} {state}" for state, number in states.items())
        + paused
        + ("; asleep" if rollout.is_asleep else "")
    ]
    if any(rollout.num_behind):
        shown = ", ".join(f"{n} by {behind}" for behind, n in rollout.num_behind.items())
        lines.append(f"  recent samples behind these weights: {shown} versions")
    if rollout.requests:
        oldest = rollout.requests[0]
        where = f"on {oldest.instance_id}" if oldest.instance_id else "queued"
        lines.append(f"  oldest request: {oldest.request_id} {where} for {seconds(oldest.age_s)}")
    return lines


def stacks_text(run: RunSnapshot) -> str:
    """Format the stacks of all processes, equal ones together."""
    found: dict[str, Sequence[StackTrace]] = {}
    for worker in run.workers:
        if worker.report is not None and worker.report.stacks:
            found[worker.worker_id] = worker.report.stacks
    parts = []
    if run.script is not None:
        own = [each for each in run.script.stacks if each.frames]
        parts.append("script:\n" + "\n".join(map(stack_text, own)))
    groups = grouped(found)
    heads = []
    for names, stacks in groups:
        heads.append(f"{len(names)} of {len(found)} workers ({named(names)}) {_doing(stacks)}")
        parts.append(f"{named(names)}:\n" + "\n".join(map(stack_text, stacks)))
    parts += [
        f"{each.worker_id}: no stacks: {each.error or 'it does not answer'}"
        for each in run.workers
        if each.worker_id not in found
    ]
    return "\n".join([*heads, ""] if heads else []) + "\n".join(parts)


def _doing(stacks: Sequence[StackTrace]) -> str:
    running = [each for each in stacks if each.call]
    if not running:
        return "have no call"
    wait, site = wait_of(running[0]), site_of(running[0])
    if wait is not None:
        return describe_wait(wait)
    return f"in {place(site)}" if site is not None else f"in {running[0].call}"


def stack_text(stack: StackTrace) -> str:
    """Format one stack, outermost frame first."""
    running = f", {stack.call} for {seconds(stack.running_s or 0.0)}" if stack.call else ""
    frames = [
        f"    {each.file}:{each.line} {each.function}" + (f": {each.text}" if each.text else "")
        for each in stack.frames
    ]
    return "\n".join([f"  {stack.thread}{running}", *(frames or ["    idle"])])


def why_text(diagnosis: Diagnosis) -> str:
    """Format a diagnosis."""
    problems = [each for each in diagnosis.findings if each.is_problem]
    notices = [each for each in diagnosis.findings if not each.is_problem]
    lines = [
        f"run {diagnosis.run_id}: " + ("no problem found." if not problems else _count(problems))
    ]
    lines += [line for each in problems for line in ("", *_finding_lines(each))]
    lines += [line for each in notices for line in ("", f"note: {each.cause}")]
    return "\n".join([*lines, "", diagnosis.waits_for])


def _count(problems: Sequence[Finding]) -> str:
    return f"{len(problems)} problem{'s' if len(problems) > 1 else ''}, causes first."


def _finding_lines(finding: Finding) -> list[str]:
    lines = [f"{finding.rule}: {finding.cause}"]
    if finding.since_s is not None:
        began = time.strftime("%H:%M:%S", time.localtime(time.time() - finding.since_s))
        lines.append(f"  since: {began} ({seconds(finding.since_s)})")
    lines += [f"  evidence: {each}" for each in finding.evidence]
    if finding.next_step:
        lines.append(f"  next: {finding.next_step}")
    return lines
