"""Rules about the flow of a run: placement, weight syncs, rollouts, and a script that waits."""

from __future__ import annotations

from collections.abc import Iterator

from helmsman.api.run_state import RolloutSnapshot, StackTrace
from helmsman.controller._diagnosis.evidence import BUSY, Evidence, Finding, is_long, seconds, usual
from helmsman.controller._diagnosis.stacks import (
    describe_wait,
    named,
    place,
    signature,
    site_of,
    wait_of,
)

_PENDING_S = 5.0
_SYNC_S = 20.0
"""The first weight sync is long after this."""
_PAUSED_S = 10.0
_SYNC_METHODS = ("update_weights", "publish_weights", "export_weights")
_DELIBERATE = ("sleep",)
"""Waits of a script that end by themselves."""


def placement(evidence: Evidence) -> Iterator[Finding]:
    """A start waits for resources that others hold."""
    for phase in evidence.now.phases:
        if phase.kind == "placement" and phase.waits_for and phase.age_s > _PENDING_S:
            yield Finding(
                rule="placement pending",
                is_problem=True,
                subject=phase.detail,
                cause=f"The placement of {phase.detail} waits for resources: {phase.waits_for}.",
                since_s=phase.age_s,
                next_step="End the holders, request less, or add nodes; helmsman plan shows "
                "the change that would make it fit.",
            )


def weight_sync(evidence: Evidence) -> Iterator[Finding]:
    """A weight sync does not end."""
    for phase in evidence.now.phases:
        limit = _SYNC_S if phase.median_s is None else None
        is_due = phase.age_s > limit if limit else is_long(phase.age_s, phase.median_s)
        if phase.kind != "weight sync" or not is_due:
            continue
        late = [
            (worker, call)
            for worker in evidence.workers
            for call in worker.now.calls
            if call.name.endswith(_SYNC_METHODS)
        ]
        shown = [
            f"{call.name} on {worker.id} has run for {seconds(call.age_s)}"
            + (f" and {describe_wait(worker.wait)}" if worker.wait is not None else "")
            for worker, call in late[:8]
        ]
        names = named(worker.id for worker, _ in late)
        waits = f"{names} have not finished their part" if late else "requests have not ended"
        yield Finding(
            rule="weight sync stuck",
            is_problem=True,
            subject=names or phase.detail,
            workers=[worker.id for worker, _ in late],
            cause=f"The weight sync from {phase.detail} has not ended for "
            f"{seconds(phase.age_s)}: {waits}.",
            evidence=[usual(phase.median_s), *shown],
            since_s=phase.age_s,
            next_step="helmsman stacks shows the threads of these workers.",
        )


def rollouts(evidence: Evidence) -> Iterator[Finding]:
    """Requests cannot start, or one of them is a straggler."""
    is_syncing = any(each.kind == "weight sync" for each in evidence.now.phases)
    for rollout in evidence.now.rollouts:
        oldest_s = rollout.requests[0].age_s if rollout.requests else 0.0
        if rollout.num_queued and oldest_s > _PAUSED_S and not rollout.num_in_flight:
            yield from _not_started(rollout, oldest_s, is_syncing=is_syncing)
        yield from _straggler(evidence, rollout)


def _not_started(
    rollout: RolloutSnapshot, oldest_s: float, *, is_syncing: bool
) -> Iterator[Finding]:
    healthy = [id_ for id_, health in rollout.instances.items() if health == "healthy"]
    if rollout.paused_by and not is_syncing:
        owners = ", ".join(owner or "pause()" for owner in rollout.paused_by)
        reason, step = f"it is paused by {owners}", "Call resume() on the rollout."
    elif rollout.is_asleep:
        reason, step = "it is asleep", "Call wake() on the rollout."
    elif not healthy:
        states = ", ".join(f"{id_} is {health}" for id_, health in rollout.instances.items())
        reason, step = f"no instance is healthy ({states})", "helmsman logs shows their failures."
    else:
        return
    yield Finding(
        rule="rollout starved",
        is_problem=True,
        subject=rollout.role,
        cause=f"{rollout.num_queued} requests of {rollout.role!r} are queued and none starts: "
        f"{reason}.",
        since_s=oldest_s,
        next_step=step,
    )


def _straggler(evidence: Evidence, rollout: RolloutSnapshot) -> Iterator[Finding]:
    in_flight = [each for each in rollout.requests if each.instance_id]
    if not in_flight or rollout.median_s is None or rollout.num_done < 3:
        return
    late = [each for each in in_flight if is_long(each.age_s, rollout.median_s, factor=8.0)]
    ids = {each.instance_id for each in late}
    if not late or rollout.num_in_flight > max(2 * len(late), 1):
        return
    busy = {each.id: each for each in evidence.workers}
    doing = []
    for id_ in sorted(ids):
        worker = busy.get(id_)
        if worker is None:
            continue
        if worker.wait is not None:
            doing.append(f"{id_} {describe_wait(worker.wait)}")
        elif worker.stack is not None:
            state = "is idle" if worker.is_idle else "computes"
            doing.append(f"{id_} {state} {worker.where()}")
    yield Finding(
        rule="straggler",
        is_problem=True,
        subject=named(sorted(ids)),
        workers=sorted(ids),
        cause=f"{len(late)} of {rollout.num_in_flight} requests in flight are stragglers: "
        f"{late[0].request_id} on {late[0].instance_id} has been open for "
        f"{seconds(late[0].age_s)}; {usual(rollout.median_s)}.",
        evidence=doing,
        since_s=late[0].age_s,
        next_step="RequestOptions(deadline_s=...) bounds a request; abort() returns its tokens so "
        "far.",
    )


def script_waits(evidence: Evidence) -> Iterator[Finding]:
    """The script itself waits, without a limit, while no worker has anything to do."""
    run, before = evidence.now, evidence.before
    if run.script is None or before.script is None or evidence.busy() or run.loop_stack:
        return
    if any(each.num_in_flight or each.num_queued for each in run.rollouts):
        return
    if any(each.kind in ("placement", "create_workers", "weight sync") for each in run.phases):
        return
    age_s = run.idle_s
    if age_s is None:
        age_s = run.taken_at - run.started_at
    if not is_long(age_s, run.longest_idle_s or None, factor=5.0):
        return
    if (run.script.cpu_s - before.script.cpu_s) / max(evidence.apart_s, 0.01) > BUSY:
        return
    earlier = {signature(each) for each in before.script.stacks}
    still = [each for each in run.script.stacks if each.frames and signature(each) in earlier]
    waiting = [each for each in still if _is_unbounded(each)]
    if not waiting:
        return
    shown = []
    for each in waiting[:8]:
        wait, site = wait_of(each), site_of(each)
        doing = (
            describe_wait(wait) if wait is not None else f"waits at {place(site)}" if site else ""
        )
        shown.append(f"{each.thread} {doing}")
    yield Finding(
        rule="script waits",
        is_problem=True,
        subject="script",
        cause=f"The script waits for something outside Helmsman: {shown[0]}. No call or request "
        "is open.",
        evidence=[*shown[1:], f"no call has begun or ended for {seconds(age_s)}"],
        since_s=age_s,
        next_step="Give the wait a timeout; helmsman stacks RUN script shows all threads.",
    )


def _is_unbounded(stack: StackTrace) -> bool:
    """Whether a stack waits for an event that may never come."""
    wait = wait_of(stack)
    if wait is not None:
        return wait.kind not in _DELIBERATE
    return stack.thread.startswith("task") and "await " in stack.frames[-1].text
