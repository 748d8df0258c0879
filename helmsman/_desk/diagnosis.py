"""Diagnosis of a run: applies all rules, root causes first, or states what a run waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from helmsman._desk import call_rules, flow_rules, process_rules, work_rules
from helmsman._desk.evidence import Evidence, Finding, seconds, usual
from helmsman._desk.stacks import at, named, wait_of
from helmsman.api.run_state import OpenCall, RunSnapshot

RULES: Sequence[Callable[[Evidence], Iterator[Finding]]] = (
    process_rules.script_process,
    process_rules.supervised_node,
    process_rules.event_loop,
    process_rules.worker_processes,
    process_rules.paused_processes,
    process_rules.silent_nodes,
    process_rules.nodes,
    flow_rules.placement,
    flow_rules.starts,
    call_rules.collectives,
    call_rules.recorded_collectives,
    call_rules.nccl_ranks,
    flow_rules.weight_sync,
    flow_rules.rollouts,
    flow_rules.stragglers,
    work_rules.hung_work,
    call_rules.blocked_calls,
    flow_rules.script_waits,
    call_rules.slow_calls,
    flow_rules.overdue_phases,
)
"""A finding of an earlier rule may be the cause of those of later ones."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Findings about a run, causes first."""

    run_id: str
    findings: list[Finding]
    waits_for: str
    """The work that the run does now, or the event that it waits for."""

    @property
    def is_healthy(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def problems(self) -> list[Finding]:
        """The findings that are more than a note."""
        return [each for each in self.findings if each.is_problem]


def diagnose_run(now: RunSnapshot, before: RunSnapshot) -> Diagnosis:
    """Apply all rules to two snapshots with reports, about a second apart."""
    evidence = Evidence(now, before)
    findings: list[Finding] = []
    explained: set[str] = set()
    for rule in RULES:
        found = list(rule(evidence))
        findings += [each for each in found if not {*each.workers} & explained]
        explained |= {worker_id for each in found for worker_id in each.workers}
    findings.sort(key=lambda each: not each.is_problem)
    return Diagnosis(run_id=now.run_id, findings=findings, waits_for=_waits_for(evidence))


def _waits_for(evidence: Evidence) -> str:
    """Describe what the run does now, in one sentence."""
    run = evidence.now
    phases = [f"{e.kind} {e.detail}".strip() + f" ({seconds(e.age_s)})" for e in run.phases]
    prefix = f"Phase {' > '.join(phases)}. " if phases else ""
    prefix += work_rules.waits_text(run)
    by_method: dict[str, list[tuple[OpenCall, str]]] = {}
    for worker in evidence.busy:
        for call in worker.now.calls:
            name = f"{worker.now.role}.{call.name.rpartition('.')[2]}"
            by_method.setdefault(name, []).append((call, worker.id))
    parts = []
    for name, calls in list(by_method.items())[:4]:
        oldest = max((call for call, _ in calls), key=lambda call: call.age_s)
        where = named(dict.fromkeys(worker_id for _, worker_id in calls))
        parts.append(f"{name} on {where} ({seconds(oldest.age_s)}; {usual(oldest.median_s)})")
    stack = run.script.stacks[0] if run.script is not None and run.script.stacks else None
    where = at(stack)
    if parts:
        return f"{prefix}The run waits for {'; '.join(parts)}."
    if (node := run.node) is not None:
        return f"Rank {node.rank} of {node.count} {node.doing} ({seconds(node.since_s)}){where}."
    if stack is not None and stack.frames and stack.frames[-1].file.endswith("/selectors.py"):
        return f"{prefix}No call is open; the script's event loop is idle."
    wait = wait_of(stack)
    doing = wait.text if wait is not None else f"runs its own code{where}"
    return f"{prefix}No call is open; the script {doing}."
