"""Rules about calls: collectives that ranks do not enter, and calls that make no progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from helmsman.api.run_state import CollectiveState, NcclRank
from helmsman.controller._diagnosis.evidence import (
    FLOOR_S,
    Evidence,
    Finding,
    WorkerEvidence,
    is_long,
    seconds,
    usual,
)
from helmsman.controller._diagnosis.stacks import at, named

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
_SAME_ORDER = "Every rank must call the same collectives with the same shapes, in the same order"
_BRANCH = f"{_SAME_ORDER}; look for a branch that depends on the rank or on its data."

_NETWORK = (
    "Check the network between the nodes: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME or "
    "GLOO_SOCKET_IFNAME, and the devices' links."
)


def collectives(evidence: Evidence) -> Iterator[Finding]:
    """Some ranks of a group wait in a collective that others do not enter."""
    for role, ranks in evidence.groups.items():
        inside = [each for each in ranks if each.is_in_collective]
        if not inside:
            continue
        waited_s = max(map(_age, inside))
        median_s = next((each.call.median_s for each in inside if each.call), None)
        if waited_s <= _STRUCTURAL_S or (median_s is not None and waited_s <= 3 * median_s):
            continue
        outside = [each for each in ranks if each not in inside]
        entered = str(inside[0].wait).removeprefix("waits in ")
        waited = f"they have waited for {seconds(waited_s)}; {usual(median_s)}"
        for each in outside:
            if _is_absent(each, waited_s, median_s):
                yield _absent(each, inside, entered, waited_s, [waited], [each.id])
        if not outside and all(each.is_still for each in inside):
            yield from _all_inside(role, inside, waited_s, median_s)


def _all_inside(
    role: str, ranks: Sequence[WorkerEvidence], waited_s: float, median_s: float | None
) -> Iterator[Finding]:
    ids, by_place = [each.id for each in ranks], dict[str, list[str]]()
    for each in ranks:
        by_place.setdefault(str(each.wait), []).append(each.id)
    groups = sorted(by_place.items(), key=lambda pair: len(pair[1]))
    described = "; ".join(f"{named(group)} {wait}" for wait, group in groups[:4])
    if len(groups) > 1:
        cause = f"The ranks of {role!r} wait for each other in different collectives: {described}."
        rule, subject, step = "deadlock of ranks", named(groups[0][1]), _BRANCH
    elif is_long(waited_s, median_s):
        entered = f"All {len(ranks)} ranks of {role!r} have entered the same collective"
        cause = f"{entered}, which does not end: {described}."
        rule, subject, step = "collective stuck", role, _NETWORK
    else:
        return
    yield Finding(rule, subject, cause, step, ids, since_s=waited_s)


def recorded_collectives(evidence: Evidence) -> Iterator[Finding]:
    """By torch's flight recorders, ranks are behind in a group, or call another collective.

    They also show collectives that no Python stack shows: those of NCCL, and asynchronous ones.
    """
    for ranks in evidence.groups.values():
        groups: dict[str, list[tuple[WorkerEvidence, CollectiveState]]] = {}
        for worker in ranks:
            for state in worker.now.report.collectives if worker.now.report is not None else ():
                groups.setdefault(state.group, []).append((worker, state))
        for members in groups.values():
            yield from _recorded(members)


def _recorded(members: Sequence[tuple[WorkerEvidence, CollectiveState]]) -> Iterator[Finding]:
    number = max(state.number for _, state in members)
    inside = [(w, s) for w, s in members if s.number == number and not s.is_done]
    waiting = [worker for worker, _ in inside]
    waited_s = max((state.age_s for _, state in inside), default=0.0)
    median_s = next((each.call.median_s for each in waiting if each.call is not None), None)
    if waited_s < _STRUCTURAL_S or not is_long(waited_s, median_s, first_s=FLOOR_S):
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
                "collective mismatch",
                named(ids),
                f"{named(kinds[wanted])} entered {text}; {named(ids)} entered {kind}.",
                _BRANCH,
                [*ids, *kinds[wanted]],
                [source],
                waited_s,
            )
    for worker, state in members:
        if state.number < number and _is_absent(worker, waited_s, median_s):
            shown = [source, f"its last one is {state.number}, {state.name}"]
            # The others wait in calls that no stack explains.
            explained = [worker.id, *(each.id for each in waiting)]
            yield _absent(worker, waiting, text, waited_s, shown, explained)


def nccl_ranks(evidence: Evidence) -> Iterator[Finding]:
    """By NCCL's RAS service, a rank of a waiting communicator is dead, silent or behind."""
    ids = {(each.now.node, each.now.pid): each.id for each in evidence.workers}
    found: dict[str, list[NcclRank]] = {}
    for worker in evidence.workers:
        for each in worker.now.report.nccl_ranks if worker.now.report is not None else ():
            found.setdefault(each.communicator, []).append(each)
    for ranks in found.values():
        if not any((each.host, each.pid) in ids for each in ranks):
            continue  # of another job on the node
        most = max(each.num_collectives for each in ranks)
        for each in ranks:
            rule, state = "NCCL rank lost", f"is {each.problem}"
            if not each.problem:
                rule = "rank missing in collective"
                state = f"has called {each.num_collectives} collectives, others {most}"
                if each.num_collectives >= most:
                    continue
            id_ = ids.get((each.host, each.pid))
            name = id_ or f"process {each.pid} on {each.host}"
            yield Finding(
                rule,
                name,
                f"{name}, rank {each.rank} of NCCL communicator {each.communicator}, {state}, by "
                "NCCL's RAS service.",
                f"Look at process {each.pid} on {each.host}, and at its node's devices and links.",
                [id_] if id_ is not None else [],
            )


def _age(worker: WorkerEvidence) -> float:
    running_s = worker.stack.running_s if worker.stack is not None else None
    return running_s if running_s is not None else worker.call.age_s if worker.call else 0.0


def _is_absent(worker: WorkerEvidence, waited_s: float, median_s: float | None) -> bool:
    if not worker.answers or not worker.is_in_call:
        return True
    is_blocked = worker.is_idle and worker.is_still
    is_late = is_blocked and is_long(waited_s, median_s, first_s=FLOOR_S)
    return is_late or is_long(waited_s, median_s, factor=10.0)


def _absent(
    worker: WorkerEvidence,
    inside: Sequence[WorkerEvidence],
    entered: str,
    waited_s: float,
    evidence: list[str],
    explained: list[str],
) -> Finding:
    health, share = worker.now.health, worker.cpu_share
    if health is not None and not health.answered:
        doing = "its process does not answer"
    elif not worker.is_in_call:
        doing = "its call has not begun" if worker.call is not None else "it has no call"
    elif worker.wait is not None:
        doing = f"it {worker.wait}"
    else:
        doing = f"it {'is blocked' if worker.is_idle else 'computes'}{at(worker.stack)}"
    count = "1 rank waits" if len(inside) == 1 else f"{len(inside)} ranks wait"
    cpu = [] if share is None else [f"{worker.id} uses {share:.2f} cores"]
    return Finding(
        "rank missing in collective",
        worker.id,
        f"{worker.id} does not enter {entered}: {doing}. {count} for it: "
        f"{named(each.id for each in inside)}.",
        f"helmsman stacks shows all threads of {worker.id}. {_SAME_ORDER}.",
        explained,
        [*evidence, *cpu],
        waited_s,
    )


def blocked_calls(evidence: Evidence) -> Iterator[Finding]:
    """A call takes much longer than earlier ones and makes no progress."""
    for worker in evidence.busy:
        call, wait = worker.call, worker.wait
        if call is None or not (worker.answers and worker.is_in_call):
            continue
        if (worker.is_in_collective and worker.now.world_size > 1) or not (
            worker.is_idle and worker.is_still
        ):
            continue
        is_external = wait is not None and wait.kind != "sleep"
        if not is_long(call.age_s, call.median_s, first_s=_EXTERNAL_S if is_external else 30.0):
            continue
        children = worker.now.report.children if worker.now.report is not None else []
        shown = [
            f"child process {each.pid} is {_STATES[each.state]}: {each.command[:80]}"
            for each in children
            if each.state in "TZ"
        ]
        kind = wait.kind if wait is not None else ""
        if not shown and children and kind in ("loader", "message", "process"):
            states = [f"{each.pid} {_STATES.get(each.state, each.state)}" for each in children]
            shown = [f"its child processes: {', '.join(states[:8])}"]
        doing = str(wait) if wait is not None else f"makes no progress{at(worker.stack)}"
        yield Finding(
            f"waits: {kind}" if kind else "no progress",
            worker.id,
            f"{call.name} on {worker.id} {doing} and has not ended for {seconds(call.age_s)}.",
            wait.next_step if wait is not None else "helmsman stacks shows all threads.",
            [worker.id],
            [usual(call.median_s), *shown],
            call.age_s,
        )


def slow_calls(evidence: Evidence) -> Iterator[Finding]:
    """A call takes much longer than earlier ones, but computes."""
    for worker in evidence.busy:
        call = worker.call
        if call is None or call.median_s is None or worker.is_in_collective:
            continue
        if is_long(call.age_s, call.median_s):
            yield Finding(
                "slow call",
                worker.id,
                f"{call.name} on {worker.id} has run for {seconds(call.age_s)}; "
                f"{usual(call.median_s)}. It makes progress{at(worker.stack)}.",
                workers=[worker.id],
                since_s=call.age_s,
                is_problem=False,
            )
