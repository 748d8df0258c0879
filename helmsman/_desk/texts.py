"""Texts of `helmsman status`, `stacks` and `why`."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence

from helmsman._desk.diagnosis import Diagnosis
from helmsman._desk.evidence import seconds, usual
from helmsman._desk.stacks import at, named, signature, wait_of
from helmsman._process.observation import size
from helmsman.api.plan import aligned
from helmsman.api.run_state import (
    RolloutSnapshot,
    RunSnapshot,
    StackTrace,
    WorkerSnapshot,
    WorkSnapshot,
)

_MOST_PROBLEMS = 5
_MOST_ITEMS = 5
"""Oldest episodes, sessions, tool calls and rewards of a source that `helmsman status` shows."""
_STILL_S = 5.0
_MOST_ROWS = 40
"""With more workers, a row stands for the workers of a role with the same state and call."""


def _one_line(text: str) -> str:
    """Replace line ends and control codes, which a terminal would execute, by question marks."""
    return "".join(each if each.isprintable() else "?" for each in text)


def verdict(diagnosis: Diagnosis) -> str:
    """Describe the state of a run in a few words."""
    number = len(diagnosis.problems)
    return f"{number} problem{'s' if number > 1 else ''}" if number else "no problem found"


def status_text(run: RunSnapshot, diagnosis: Diagnosis, earlier: RunSnapshot | None = None) -> str:
    """Format a run on one screen; rates begin at the earlier snapshot, else at the start."""
    age_s, node = max(run.taken_at - run.started_at, 0.0), run.node
    lines = [
        f"run {run.run_id}  {run.scheduler}  up {seconds(age_s)}  pid {run.pid} on {run.host}",
        f"script: {run.command}",
        f"state: {verdict(diagnosis)}",
        *(
            _one_line(f"  {each.rule}: {each.cause}")
            for each in diagnosis.problems[:_MOST_PROBLEMS]
        ),
    ]
    if node is not None:
        lines.append(f"rank {node.rank} of {node.count} {node.doing} ({seconds(node.since_s)})")
        lines += [f"missing: {node.missing}"] if node.missing else []
        lines += [f"head: {node.head}"] if node.head else []
        lines += [f"{name}: pid {pid}, {state}" for name, (pid, state) in node.processes.items()]
    if run.answered_by == "observation":
        stuck = f" for {seconds(run.script_stuck_s)}" if run.script_stuck_s is not None else ""
        state = f"its process is in state {run.script_state}"
        lines.append(f"THE SCRIPT DOES NOT ANSWER{stuck}; {state}")
    if run.facts:
        lines.append(_one_line("  ".join(f"{name} {value}" for name, value in run.facts.items())))
    for phase in run.phases:
        name = f"{phase.kind} {phase.detail}".rstrip()
        age = f"{seconds(phase.age_s)}; {usual(phase.median_s)}"
        lines.append(_one_line(f"phase: {name[:80]} ({age})"))
    head = ("worker", "state", "node", "devices", "call", "for", "median", "memory", "restarts")
    groups: dict[object, list[WorkerSnapshot]] = {}
    for each in run.workers:
        is_short = len(run.workers) <= _MOST_ROWS
        key = each.worker_id if is_short else (each.role, state_of(each), _call(each))
        groups.setdefault(key, []).append(each)
    lines += ["", aligned([head, *map(_row, groups.values())])]
    before = {each.role: each for each in earlier.rollouts} if earlier is not None else {}
    for rollout in run.rollouts:
        first = before.get(rollout.role)
        since = earlier.taken_at if earlier is not None and first is not None else run.started_at
        lines += ["", *_rollout_lines(rollout, first, max(run.taken_at - since, 0.001))]
    for work in run.work:
        lines += ["", *_work_lines(work)]
    return "\n".join(lines)


def _row(workers: Sequence[WorkerSnapshot]) -> tuple[str, ...]:
    first = max(workers, key=lambda each: each.calls[0].age_s if each.calls else 0.0)
    call = first.calls[0] if first.calls else None
    nodes = {each.node for each in workers}
    # Inline workers share a process.
    sizes = {(e.node, e.pid): e.health.rss_bytes for e in workers if e.health is not None}
    more = f" and {len(first.calls) - 1} more" if len(first.calls) > 1 else ""
    return (
        named(each.worker_id for each in workers),
        state_of(first),
        first.node if len(nodes) == 1 else f"{len(nodes)} nodes",
        ",".join(first.devices) if len(workers) == 1 else str(sum(len(e.devices) for e in workers)),
        _call(first) + more,
        seconds(call.age_s if call is not None else None),
        seconds(call.median_s if call is not None else None),
        size(sum(sizes.values())) if any(sizes.values()) else "",
        str(sum(each.num_restarts for each in workers) or ""),
    )


def state_of(worker: WorkerSnapshot) -> str:
    """Describe the state of a worker in a word."""
    health = worker.health
    if worker.state in ("failed", "stopped", "restarting", "ended"):
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
    running = worker.health.running if worker.health is not None else None
    return (worker.calls[0].name if worker.calls else running or "").rpartition(".")[2]


def _rollout_lines(
    rollout: RolloutSnapshot, before: RolloutSnapshot | None, apart_s: float
) -> list[str]:
    num_tokens = rollout.num_tokens_done - (before.num_tokens_done if before is not None else 0)
    median = f", median {seconds(rollout.median_s)}" if rollout.median_s is not None else ""
    states = collections.Counter(rollout.instances.values())
    counts = f"{rollout.num_queued} queued, {rollout.num_in_flight} in flight"
    line = f"{rollout.role}: {counts}, {rollout.num_done} done{median}"
    line += f"; {num_tokens / apart_s:.0f} tokens/s"
    line += f"; weight version {'none' if rollout.version is None else rollout.version}"
    line += "; instances: " + ", ".join(f"{number} {state}" for state, number in states.items())
    if rollout.paused_by:
        line += f"; paused by {', '.join(each or 'pause()' for each in rollout.paused_by)}"
    lines = [line + ("; asleep" if rollout.is_asleep else "")]
    if any(rollout.num_behind):
        shown = ", ".join(f"{n} by {behind}" for behind, n in rollout.num_behind.items())
        lines.append(f"  recent samples behind these weights: {shown} versions")
    if rollout.requests:
        oldest = rollout.requests[0]
        where = f"on {oldest.instance_id}" if oldest.instance_id else "queued"
        lines.append(f"  oldest request: {oldest.request_id} {where} for {seconds(oldest.age_s)}")
    return lines


def _work_lines(work: WorkSnapshot) -> list[str]:
    median = f", median {seconds(work.median_s)}" if work.median_s is not None else ""
    line = f"{work.kind}s of {work.name}: {work.num_open} open, {work.num_done} ended{median}"
    for wait in work.waits:
        line += f"; {wait.call} has {wait.num_ready} of {wait.num_wanted} ({seconds(wait.age_s)})"
        line += "".join(f", {each}" for each in (wait.blocked_at, wait.remark) if each)
    lines = [_one_line(line)]
    for each in work.items[:_MOST_ITEMS]:
        still = f", no progress for {seconds(each.still_s)}" if each.still_s > _STILL_S else ""
        text = f"  {each.number} ({each.name[:60]}) for {seconds(each.age_s)}{still}: "
        lines.append(_one_line(text + each.waits_for))
    rest = work.num_open - len(work.items[:_MOST_ITEMS])
    return [*lines, f"  and {rest} more"] if rest else lines


def stacks_text(run: RunSnapshot) -> str:
    """Format the stacks of all processes, equal ones together."""
    found = {e.worker_id: e.report.stacks for e in run.workers if e.report and e.report.stacks}
    heads, parts = [], []
    if run.script is not None:
        parts.append(stack_text("script", [each for each in run.script.stacks if each.frames]))
    groups: dict[object, list[str]] = {}
    for name, stacks in found.items():
        key = tuple((each.thread if not each.call else "", signature(each)) for each in stacks)
        groups.setdefault(key, []).append(name)
    for names in sorted(groups.values(), key=len, reverse=True):
        stacks = found[names[0]]
        running = next((each for each in stacks if each.call), None)
        doing = "have no call"
        if running is not None:
            wait = wait_of(running)
            doing = wait.text if wait else f"in {at(running).removeprefix(' at ') or running.call}"
        heads.append(f"{len(names)} of {len(found)} workers ({named(names)}) {doing}")
        parts.append(stack_text(named(names), stacks))
    for each in run.workers:
        if each.worker_id not in found:
            reason = each.error or "it does not answer"
            parts.append(f"{each.worker_id}: no stacks: {reason}")
    return "\n".join([*heads, *([""] if heads else []), *parts])


def stack_text(name: str, stacks: Sequence[StackTrace]) -> str:
    """Format the stacks of a process, outermost frames first."""
    lines = [f"{name}:"]
    for each in stacks:
        running = f", {each.call} for {seconds(each.running_s or 0.0)}" if each.call else ""
        lines.append(f"  {each.thread}{running}")
        lines += [
            f"    {frame.file}:{frame.line} {frame.function}: {frame.text}".removesuffix(": ")
            for frame in each.frames
        ] or ["    idle"]
    return "\n".join(lines)


def why_text(diagnosis: Diagnosis) -> str:
    """Format a diagnosis."""
    order = "" if diagnosis.is_healthy else ", causes first"
    lines = [f"run {diagnosis.run_id}: {verdict(diagnosis)}{order}."]
    for each in diagnosis.findings:
        lines += ["", _one_line(f"{each.rule if each.is_problem else 'note'}: {each.cause}")]
        if not each.is_problem:
            continue
        if each.since_s is not None:
            began = time.strftime("%H:%M:%S", time.localtime(time.time() - each.since_s))
            lines.append(f"  since: {began} ({seconds(each.since_s)})")
        lines += [_one_line(f"  evidence: {shown}") for shown in each.evidence]
        lines += [f"  next: {each.next_step}"] if each.next_step else []
    return "\n".join([*lines, "", diagnosis.waits_for])
