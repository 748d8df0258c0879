"""Rules about the flow of a run: placement, weight syncs, rollouts, and a script that waits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from helmsman._desk.evidence import (
    BUSY,
    FIRST_S,
    Evidence,
    Finding,
    earlier_of,
    is_long,
    made_by,
    seconds,
    usual,
)
from helmsman._desk.stacks import (
    at,
    in_helmsman,
    named,
    signature,
    users_stacks,
    wait_of,
)
from helmsman.api.run_state import RequestSnapshot, RolloutSnapshot, StackTrace

_PENDING_S = 5.0
_SYNC_S = 20.0
"""The first weight sync is long after this."""
_STARTING = 0.05
"""A forkserver that uses more than this share of a core starts workers."""
_PAUSED_S = 10.0
_ENDLESS = ("futex", "recv", "connect", "accept", "sem", "flock", "wait")
"""System calls that end by an event only, unlike the wait of an idle interpreter for input."""
_SYNC_METHODS = ("update_weights", "publish_weights", "export_weights")


def placement(evidence: Evidence) -> Iterator[Finding]:
    """A start waits for resources that others hold."""
    for phase in evidence.now.phases:
        if phase.kind == "placement" and phase.waits_for and phase.age_s > _PENDING_S:
            cause = f"The placement of {phase.detail} waits for resources: {phase.waits_for}."
            step = "End the holders, request less, or add nodes; helmsman plan shows the change "
            step += "that would make it fit."
            yield Finding("placement pending", phase.detail, cause, step, since_s=phase.age_s)


def starts(evidence: Evidence) -> Iterator[Finding]:
    """The process that forks local workers makes no progress while a start waits for it."""
    reports = evidence.now.script, evidence.before.script
    now, before = (each.forkserver if each is not None else None for each in reports)
    if now is None or before is None or evidence.apart_s <= 0:
        return
    cpu_share = ((now.cpu_s or 0.0) - (before.cpu_s or 0.0)) / evidence.apart_s
    if cpu_share > _STARTING or now.moved_bytes > before.moved_bytes:
        return
    for phase in evidence.now.phases:
        if phase.kind == "create_workers" and is_long(phase.age_s, phase.median_s, first_s=FIRST_S):
            cause = f"The start of {phase.detail} waits for the forkserver, process {now.number}, "
            cause += "which makes no progress; a module that it preloads may wait."
            step = f"py-spy dump --pid {now.number} shows its stack; forkserver.log has its output."
            yield Finding("start stuck", phase.detail, cause, step, since_s=phase.age_s)


def weight_sync(evidence: Evidence) -> Iterator[Finding]:
    """A weight sync does not end."""
    for phase in evidence.now.phases:
        if phase.kind != "weight sync" or not is_long(phase.age_s, phase.median_s, first_s=_SYNC_S):
            continue
        calls = [(w, e) for w in evidence.workers for e in w.now.calls]
        open_calls = [(w, e) for w, e in calls if e.name.endswith(_SYNC_METHODS)]
        late = {
            worker.id: f"{call.name} on {worker.id} has run for {seconds(call.age_s)}"
            + (f" and {worker.wait.text}" if worker.wait is not None else "")
            for worker, call in open_calls
            if not worker.moves_data
        }
        if open_calls and not late:
            continue
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
        starved = [e for e in rollout.requests if not e.instance_id and _is_overtaken(e, rollout)]
        if starved and rollout.num_in_flight:
            first = starved[0]
            cause = f"Requests of {rollout.role!r} starve: {first.request_id} has been queued for "
            cause += f"{seconds(first.age_s)}, and requests that came up to "
            cause += f"{seconds(first.overtaken_s)} later have started before it."
            step = "Give it a higher priority, or send fewer requests of higher priority."
            shown = [usual(rollout.median_s), f"{len(starved)} were overtaken"]
            rule = "requests starve"
            yield Finding(rule, rollout.role, cause, step, [], shown, first.age_s)


def _is_overtaken(request: RequestSnapshot, rollout: RolloutSnapshot) -> bool:
    return is_long(request.overtaken_s, rollout.median_s)


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


def overdue_phases(evidence: Evidence) -> Iterator[Finding]:
    """A phase takes longer than the run's HangPolicy allows."""
    for phase in evidence.now.phases:
        if phase.limit_s is not None and phase.age_s > phase.limit_s:
            name = f"{phase.kind} {phase.detail}".rstrip()
            cause = f"The phase {name} has lasted for {seconds(phase.age_s)}; "
            cause += f"{usual(phase.median_s)}."
            step = "helmsman stacks shows all threads."
            yield Finding("overdue phase", name, cause, step, since_s=phase.age_s)


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
    if any(each.num_open or each.waits for each in run.work):
        return  # hung_work judges it
    if any(each.kind in ("placement", "create_workers", "weight sync") for each in run.phases):
        return
    age_s = run.taken_at - run.started_at if run.idle_s is None else run.idle_s
    is_busy = run.script.cpu_s - before.cpu_s > BUSY * max(evidence.apart_s, 0.01)
    if is_busy or not is_long(age_s, run.longest_idle_s or None, first_s=FIRST_S):
        return
    earlier = {signature(each) for each in before.stacks}
    made = [made_by(e, earlier_of(e, before), evidence.apart_s) for e in run.script.stacks]
    own: list[str] = []
    others: list[str] = []  # such as idle threads of pools, which wait in healthy runs, too
    for each, progress in zip(run.script.stacks, made, strict=True):
        is_beside = not progress.is_connected and any(other.moves_data for other in made)
        if progress.moves_data or is_beside or signature(each) not in earlier:
            continue
        if each.frames and (text := _endless_wait(each)):
            is_own = each.thread.startswith("task") or each.thread == "main"
            (own if is_own else others).append(f"{each.thread} {text}")
    if own:
        cause = f"The script waits for something outside Helmsman: {own[0]}. No call or request "
        cause += "is open."
        step = "Give the wait a timeout; helmsman stacks RUN script shows all threads."
        shown = [*[*own[1:], *others][:7], f"no call has begun or ended for {seconds(age_s)}"]
        yield Finding("script waits", "script", cause, step, [], shown, age_s)


def _endless_wait(stack: StackTrace) -> str:
    """Describe the wait of a thread or task of the script; '' if it may end by itself."""
    if (wait := wait_of(stack)) is not None:
        return wait.text if wait.kind != "sleep" else ""
    if stack.thread.startswith("task") and "await " in stack.frames[-1].text:
        return f"waits{at(stack)}"
    waits_in = stack.progress.waits_in if stack.progress is not None else ""
    return f"waits in {waits_in}{at(stack)}" if waits_in.startswith(_ENDLESS) else ""
