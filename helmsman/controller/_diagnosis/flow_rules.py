"""Rules about the flow of a run: placement, weight syncs, rollouts, and a script that waits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from helmsman.api.run_state import RolloutSnapshot
from helmsman.controller._diagnosis.evidence import BUSY, Evidence, Finding, is_long, seconds, usual
from helmsman.controller._diagnosis.stacks import (
    at,
    in_helmsman,
    named,
    signature,
    users_stacks,
    wait_of,
)

_PENDING_S = 5.0
_SYNC_S = 20.0
"""The first weight sync is long after this."""
_PAUSED_S = 10.0
_SYNC_METHODS = ("update_weights", "publish_weights", "export_weights")


def placement(evidence: Evidence) -> Iterator[Finding]:
    """A start waits for resources that others hold."""
    for phase in evidence.now.phases:
        if phase.kind == "placement" and phase.waits_for and phase.age_s > _PENDING_S:
            cause = f"The placement of {phase.detail} waits for resources: {phase.waits_for}."
            step = "End the holders, request less, or add nodes; helmsman plan shows the change "
            step += "that would make it fit."
            yield Finding("placement pending", phase.detail, cause, step, since_s=phase.age_s)


def weight_sync(evidence: Evidence) -> Iterator[Finding]:
    """A weight sync does not end."""
    for phase in evidence.now.phases:
        if phase.kind != "weight sync" or not is_long(phase.age_s, phase.median_s, first_s=_SYNC_S):
            continue
        late = {
            worker.id: f"{call.name} on {worker.id} has run for {seconds(call.age_s)}"
            + (f" and {worker.wait.text}" if worker.wait is not None else "")
            for worker in evidence.workers
            for call in worker.now.calls
            if call.name.endswith(_SYNC_METHODS)
        }
        waits = f"{named(late)} have not finished their part" if late else "requests have not ended"
        subject, open_s = named(late) or phase.detail, seconds(phase.age_s)
        cause = f"The weight sync from {phase.detail} has not ended for {open_s}: {waits}."
        step = "helmsman stacks shows the threads of these workers."
        shown = [usual(phase.median_s), *list(late.values())[:8]]
        yield Finding("weight sync stuck", subject, cause, step, [*late], shown, phase.age_s)


def rollouts(evidence: Evidence) -> Iterator[Finding]:
    """Requests cannot start."""
    is_syncing = any(each.kind == "weight sync" for each in evidence.now.phases)
    for rollout in evidence.now.rollouts:
        oldest_s = rollout.requests[0].age_s if rollout.requests else 0.0
        if rollout.num_queued and oldest_s > _PAUSED_S and not rollout.num_in_flight:
            reason, step = _not_started(rollout, is_syncing=is_syncing)
            cause = f"{rollout.num_queued} requests of {rollout.role!r} are queued and none starts"
            if reason:
                text = f"{cause}: {reason}."
                yield Finding("rollout starved", rollout.role, text, step, since_s=oldest_s)


def _not_started(rollout: RolloutSnapshot, *, is_syncing: bool) -> tuple[str, str]:
    """Return why no request starts, and the next step; '' if it is unknown."""
    if rollout.paused_by and not is_syncing:
        owners = ", ".join(owner or "pause()" for owner in rollout.paused_by)
        return f"it is paused by {owners}", "Call resume() on the rollout."
    if rollout.is_asleep:
        return "it is asleep", "Call wake() on the rollout."
    if "healthy" in rollout.instances.values():
        return "", ""
    states = ", ".join(f"{id_} is {health}" for id_, health in rollout.instances.items())
    drained = [id_ for id_, health in rollout.instances.items() if health == "drained"]
    step = f"helmsman resume {drained[0]} ends its drain." if drained else ""
    return f"no instance serves ({states})", step or "helmsman logs shows their failures."


def stragglers(evidence: Evidence) -> Iterator[Finding]:
    """A few requests take much longer than the others."""
    for rollout in evidence.now.rollouts:
        median_s, opened = rollout.median_s, [e for e in rollout.requests if e.instance_id]
        late = [e for e in opened if is_long(e.age_s, median_s, factor=8.0, first_s=math.inf)]
        if not late or rollout.num_done < 3 or rollout.num_in_flight > max(2 * len(late), 1):
            continue
        ids, first = sorted({each.instance_id for each in late}), late[0]
        doing = [f"{e.id} {e.doing}" for e in evidence.workers if e.id in ids and e.stack]
        cause = f"{len(late)} of {rollout.num_in_flight} requests in flight are stragglers: "
        cause += f"{first.request_id} on {first.instance_id} has been open for "
        cause += f"{seconds(first.age_s)}; {usual(median_s)}."
        step = "RequestOptions(deadline_s=...) bounds a request; abort() returns its tokens so far."
        yield Finding("straggler", named(ids), cause, step, ids, doing, first.age_s)


def script_waits(evidence: Evidence) -> Iterator[Finding]:
    """The script itself waits, without a limit, while no worker has anything to do."""
    run, before = evidence.now, evidence.before.script
    if run.script is None or before is None or run.answered_by == "observation":
        return  # script_process explains a script that does not answer
    is_open = any(each.num_in_flight or each.num_queued for each in run.rollouts)
    main = next((each for each in run.script.stacks if each.thread == "main"), None)
    if evidence.busy or run.loop_stack or is_open or in_helmsman(main):
        return  # in Helmsman, it waits for another run that the script has
    if users_stacks(run.script.stacks) != users_stacks(before.stacks):
        return  # other threads or tasks of the script make progress
    if any(each.kind in ("placement", "create_workers", "weight sync") for each in run.phases):
        return
    age_s = run.taken_at - run.started_at if run.idle_s is None else run.idle_s
    is_busy = run.script.cpu_s - before.cpu_s > BUSY * max(evidence.apart_s, 0.01)
    if is_busy or not is_long(age_s, run.longest_idle_s or None):
        return
    earlier = {signature(each) for each in before.stacks}
    own: list[str] = []
    others: list[str] = []  # such as idle threads of pools, which wait in healthy runs, too
    for each in run.script.stacks:
        if each.frames and signature(each) in earlier:
            wait, line = wait_of(each), each.frames[-1].text
            is_task = each.thread.startswith("task")
            is_endless = wait.kind != "sleep" if wait is not None else is_task and "await " in line
            if is_endless:
                text = f"{each.thread} {wait.text if wait else 'waits' + at(each)}"
                (own if is_task or each.thread == "main" else others).append(text)
    if own:
        cause = f"The script waits for something outside Helmsman: {own[0]}. No call or request "
        cause += "is open."
        step = "Give the wait a timeout; helmsman stacks RUN script shows all threads."
        shown = [*[*own[1:], *others][:7], f"no call has begun or ended for {seconds(age_s)}"]
        yield Finding("script waits", "script", cause, step, [], shown, age_s)
