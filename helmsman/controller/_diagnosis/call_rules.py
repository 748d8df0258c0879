"""Rules about calls: collectives that ranks do not enter, and calls that make no progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from helmsman.api.run_state import CollectiveState, NcclRank, OpenCall
from helmsman.controller._diagnosis.evidence import (
    Evidence,
    Finding,
    WorkerEvidence,
    is_late,
    is_long,
    seconds,
    usual,
)
from helmsman.controller._diagnosis.stacks import Wait, describe_wait, named, place, site_of

_STRUCTURAL_S = 5.0
"""Ranks that wait for each other are a finding after this time."""
_EXTERNAL_S = 15.0
"""The first call of a method is long after this if it waits for something outside its process."""
_STATES = {
    "T": "stopped",
    "Z": "a zombie",
    "S": "asleep",
    "R": "running",
    "D": "waiting for a disk",
}


def collectives(evidence: Evidence) -> Iterator[Finding]:
    """Some ranks of a group wait in a collective that others do not enter."""
    for role, ranks in evidence.groups().items():
        inside = [
            each for each in ranks if each.wait is not None and each.wait.kind == "collective"
        ]
        if not inside:
            continue
        waited_s = max((_age(each) for each in inside), default=0.0)
        median_s = next((each.call.median_s for each in inside if each.call), None)
        outside = [each for each in ranks if each not in inside]
        is_due = waited_s > _STRUCTURAL_S and (median_s is None or waited_s > 3 * median_s)
        if outside:
            wait = inside[0].wait
            assert wait is not None
            entered = f"{wait.what} at {place(wait.site)}" if wait.site is not None else wait.what
            waited = f"they have waited for {seconds(waited_s)}; {usual(median_s)}"
            yield from (
                _absent(each, inside, entered, waited_s, [waited])
                for each in outside
                if is_due and _is_absent(each, waited_s, median_s)
            )
        elif is_due and all(each.is_still for each in inside):
            yield from _all_inside(role, inside, waited_s, median_s)


def recorded_collectives(evidence: Evidence) -> Iterator[Finding]:
    """By torch's flight recorders, ranks are behind in a group, or call another collective.

    They also show collectives that no Python stack shows: those of NCCL, and asynchronous ones.
    """
    for ranks in evidence.groups().values():
        groups: dict[str, list[tuple[WorkerEvidence, CollectiveState]]] = {}
        for worker in ranks:
            report = worker.now.report
            for state in report.collectives if report is not None else ():
                groups.setdefault(state.group, []).append((worker, state))
        for members in groups.values():
            yield from _recorded(members)


def _recorded(members: Sequence[tuple[WorkerEvidence, CollectiveState]]) -> Iterator[Finding]:
    number = max(state.number for _, state in members)
    inside = [(w, s) for w, s in members if s.number == number and not s.is_done]
    waited_s = max((s.age_s for _, s in inside), default=0.0)
    median_s = next((w.call.median_s for w, _ in inside if w.call is not None), None)
    if waited_s < _STRUCTURAL_S or not is_late(waited_s, median_s):
        return
    kinds: dict[str, list[str]] = {}
    for worker, state in inside:
        has_equal_sizes = state.name.rpartition(":")[2] in ("all_reduce", "broadcast")
        sizes = f" of shapes {state.sizes}" if has_equal_sizes else ""
        kinds.setdefault(f"{state.name}{sizes}", []).append(worker.id)
    wanted = max(kinds, key=lambda kind: len(kinds[kind]))
    text = f"collective {number} of group {inside[0][1].group!r}, {wanted}"
    source = "torch's flight recorder shows the last collective of each rank"
    for kind, ids in kinds.items():
        if kind != wanted:
            yield Finding(
                rule="collective mismatch",
                is_problem=True,
                subject=named(ids),
                workers=[*ids, *kinds[wanted]],
                cause=f"{named(kinds[wanted])} entered {text}; {named(ids)} entered {kind}.",
                evidence=[source],
                since_s=waited_s,
                next_step="Every rank must call the same collectives with the same shapes, in the "
                "same order; look for a branch that depends on the rank or on its data.",
            )
    for worker, state in members:
        if state.number < number and _is_absent(worker, waited_s, median_s):
            last = f"its last one is {state.number}, {state.name}"
            waiting = [each for each, _ in inside]
            finding = _absent(worker, waiting, text, waited_s, [source, last])
            # The others wait in calls that no stack explains.
            yield msgspec.structs.replace(finding, workers=[worker.id, *(w.id for w in waiting)])


def nccl_ranks(evidence: Evidence) -> Iterator[Finding]:
    """By NCCL's RAS service, a rank of a waiting communicator is dead, silent or behind."""
    workers = {(each.now.node, each.now.pid): each for each in evidence.workers}
    found: dict[str, list[NcclRank]] = {}
    for worker in evidence.workers:
        for each in worker.now.report.nccl_ranks if worker.now.report is not None else ():
            found.setdefault(each.communicator, []).append(each)
    for ranks in found.values():
        if not any((each.host, each.pid) in workers for each in ranks):
            continue  # of another job on the node
        most = max(each.num_collectives for each in ranks)
        for each in ranks:
            if not each.problem and each.num_collectives >= most:
                continue
            worker_ = workers.get((each.host, each.pid))
            name = worker_.id if worker_ is not None else f"process {each.pid} on {each.host}"
            state = (
                f"is {each.problem}"
                if each.problem
                else f"has called {each.num_collectives} collectives, others {most}"
            )
            yield Finding(
                rule="NCCL rank lost" if each.problem else "rank missing in collective",
                is_problem=True,
                subject=name,
                workers=[worker_.id] if worker_ is not None else [],
                cause=f"{name}, rank {each.rank} of NCCL communicator {each.communicator}, "
                f"{state}, by NCCL's RAS service.",
                next_step=f"Look at process {each.pid} on {each.host}, and at its node's devices "
                "and links.",
            )


def _age(worker: WorkerEvidence) -> float:
    running_s = worker.stack.running_s if worker.stack is not None else None
    return running_s if running_s is not None else worker.call.age_s if worker.call else 0.0


def _is_absent(worker: WorkerEvidence, waited_s: float, median_s: float | None) -> bool:
    if worker.now.health is None or not worker.now.health.answered:
        return True
    if worker.stack is None or not worker.stack.call:
        return True
    is_blocked = worker.is_idle and worker.is_still
    return (is_blocked and is_late(waited_s, median_s)) or is_long(waited_s, median_s, factor=10.0)


def _absent(
    worker: WorkerEvidence,
    inside: Sequence[WorkerEvidence],
    entered: str,
    waited_s: float,
    evidence: list[str],
) -> Finding:
    if worker.now.health is not None and not worker.now.health.answered:
        doing = "its process does not answer"
    elif worker.stack is None or not worker.stack.call:
        doing = "it has no call"
        if worker.now.calls:
            doing = "its call has not begun"
    elif worker.wait is not None:
        doing = f"it {describe_wait(worker.wait)}"
    else:
        site = site_of(worker.stack)
        at = f" at {place(site)}" if site is not None else ""
        doing = f"it {'is blocked' if worker.is_idle else 'computes'}{at}"
    share = worker.cpu_share
    cpu = [] if share is None else [f"{worker.id} uses {share:.2f} cores"]
    return Finding(
        rule="rank missing in collective",
        is_problem=True,
        subject=worker.id,
        workers=[worker.id],
        cause=f"{worker.id} does not enter {entered}: {doing}. "
        f"{_count(len(inside), 'rank')} for it: {named(each.id for each in inside)}.",
        evidence=[*evidence, *cpu],
        since_s=waited_s,
        next_step=f"helmsman stacks shows all threads of {worker.id}. Every rank must call the "
        "same collectives in the same order.",
    )


def _count(number: int, what: str) -> str:
    return f"1 {what} waits" if number == 1 else f"{number} {what}s wait"


def _all_inside(
    role: str, ranks: Sequence[WorkerEvidence], waited_s: float, median_s: float | None
) -> Iterator[Finding]:
    by_place: dict[tuple[str, str], list[WorkerEvidence]] = {}
    for each in ranks:
        wait = each.wait
        assert wait is not None
        by_place.setdefault((wait.what, str(wait.site)), []).append(each)
    groups = sorted(by_place.values(), key=len)
    described = [f"{named(e.id for e in group)} {_wait_text(group[0].wait)}" for group in groups]
    if len(groups) > 1:
        yield Finding(
            rule="deadlock of ranks",
            is_problem=True,
            subject=named(each.id for each in groups[0]),
            workers=[each.id for each in ranks],
            cause=f"The ranks of {role!r} wait for each other in different collectives: "
            f"{'; '.join(described[:4])}.",
            since_s=waited_s,
            next_step="Every rank must call the same collectives in the same order; look for a "
            "branch that depends on the rank or on its data.",
        )
    elif is_long(waited_s, median_s):
        yield Finding(
            rule="collective stuck",
            is_problem=True,
            subject=role,
            workers=[each.id for each in ranks],
            cause=f"All {len(ranks)} ranks of {role!r} have entered the same collective, which "
            f"does not end: {described[0]}.",
            since_s=waited_s,
            next_step="Check the network between the nodes: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME or "
            "GLOO_SOCKET_IFNAME, and the devices' links.",
        )


def _wait_text(wait: Wait | None) -> str:
    return describe_wait(wait) if wait is not None else "computes"


def blocked_calls(evidence: Evidence) -> Iterator[Finding]:
    """A call takes much longer than earlier ones and makes no progress."""
    for worker in evidence.busy():
        call = worker.call
        assert call is not None
        if worker.now.health is None or not worker.now.health.answered or worker.stack is None:
            continue
        if not worker.stack.call:
            continue
        wait = worker.wait
        if wait is not None and wait.kind == "collective" and worker.now.world_size > 1:
            continue
        is_external = wait is not None and wait.kind != "sleep"
        is_stuck = worker.is_idle and worker.is_still
        is_due = is_long(call.age_s, call.median_s) or (
            is_external and call.median_s is None and call.age_s > _EXTERNAL_S
        )
        if is_due and is_stuck:
            yield _blocked(worker, call, wait)


def _blocked(worker: WorkerEvidence, call: OpenCall, wait: Wait | None) -> Finding:
    assert worker.stack is not None
    site = site_of(worker.stack)
    at = f" at {place(site)}" if site is not None else ""
    doing = describe_wait(wait) if wait is not None else f"makes no progress{at}"
    children = worker.now.report.children if worker.now.report is not None else []
    odd = [each for each in children if each.state in "TZ"]
    shown = [
        f"child process {each.pid} is {_STATES[each.state]}: {each.command[:80]}" for each in odd
    ]
    if not odd and children and wait is not None and wait.kind in ("loader", "message", "process"):
        states = [f"{each.pid} {_STATES.get(each.state, each.state)}" for each in children]
        shown = [f"its child processes: {', '.join(states[:8])}"]
    next_steps = {
        "loader": "Check the DataLoader's worker processes and the data's storage.",
        "name lookup": "Check /etc/resolv.conf and the name server of the node.",
        "connection": "Check that the peer runs and that no firewall is in between; set a timeout.",
        "lock": "Look for the thread or process that holds it; helmsman stacks shows all threads.",
        "message": "Look at the process that should send it.",
        "process": "Look at the child process.",
        "file": "Check the file system; a named pipe or a network mount may block.",
    }
    return Finding(
        rule=f"waits: {wait.kind}" if wait is not None else "no progress",
        is_problem=True,
        subject=worker.id,
        workers=[worker.id],
        cause=f"{call.name} on {worker.id} {doing} and has not ended for {seconds(call.age_s)}.",
        evidence=[usual(call.median_s), *shown],
        since_s=call.age_s,
        next_step=next_steps.get(wait.kind if wait else "", "helmsman stacks shows all threads."),
    )


def slow_calls(evidence: Evidence) -> Iterator[Finding]:
    """A call takes much longer than earlier ones, but computes."""
    for worker in evidence.busy():
        call = worker.call
        assert call is not None
        waits = worker.wait is not None and worker.wait.kind == "collective"
        if call.median_s is not None and not waits and is_long(call.age_s, call.median_s):
            yield Finding(
                rule="slow call",
                is_problem=False,
                subject=worker.id,
                workers=[worker.id],
                cause=f"{call.name} on {worker.id} has run for {seconds(call.age_s)}; "
                f"{usual(call.median_s)}. It makes progress {worker.where()}.",
                since_s=call.age_s,
            )
