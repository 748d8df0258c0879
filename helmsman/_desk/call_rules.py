"""Rules about calls: collectives that ranks do not enter, and calls that make no progress."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from helmsman._desk.evidence import (
    FIRST_S,
    FLOOR_S,
    STATES,
    Evidence,
    Finding,
    WorkerEvidence,
    is_long,
    seconds,
    usual,
)
from helmsman._desk.stacks import named, place
from helmsman.api.run_state import CollectiveState, NcclRank

_STRUCTURAL_S = 5.0
"""Ranks that wait for each other are a finding after this time."""
_FACTOR = 10.0
"""A call that computes is long from this multiple of the median of earlier ones."""
_SAME_ORDER = "Every rank must call the same collectives with the same shapes, in the same order"
_BRANCH = f"{_SAME_ORDER}; look for a branch that depends on the rank or on its data."
_NETWORK = (
    "Check the network between the nodes: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME or "
    "GLOO_SOCKET_IFNAME, and the devices' links."
)


def collectives(evidence: Evidence) -> Iterator[Finding]:
    """Some ranks of a group wait in a collective that others do not enter."""
    for role, ranks in evidence.groups.items():
        by_wait: dict[str, list[WorkerEvidence]] = {}
        for each in ranks:
            if each.wait is not None and each.wait.kind == "collective":
                by_wait.setdefault(each.wait.text, []).append(each)
        inside = [each for group in by_wait.values() for each in group]
        waited_s, median_s = max((e.age_s for e in inside), default=0.0), _median(inside)
        if waited_s <= max(_STRUCTURAL_S, 3 * (median_s or 0.0)):
            continue
        outside = [each for each in ranks if each not in inside]
        entered = next(iter(by_wait)).removeprefix("waits in ")
        waited = f"they have waited for {seconds(waited_s)}; {usual(median_s)}"
        for each in outside:
            if _is_absent(each, waited_s, median_s):
                yield _absent(each, inside, entered, waited_s, [waited], [each.id])
        if outside or not all(each.is_still for each in inside):
            continue
        ids, groups = [each.id for each in ranks], sorted(by_wait.items(), key=lambda e: len(e[1]))
        places = "; ".join(f"{named(each.id for each in group)} {w}" for w, group in groups[:4])
        if len(groups) > 1:
            cause = f"The ranks of {role!r} wait for each other in different collectives: {places}."
            first = named(each.id for each in groups[0][1])
            yield Finding("deadlock of ranks", first, cause, _BRANCH, ids, since_s=waited_s)
        elif is_long(waited_s, median_s):
            entered = f"All {len(ranks)} ranks of {role!r} have entered the same collective"
            cause = f"{entered}, which does not end: {places}."
            yield Finding("collective stuck", role, cause, _NETWORK, ids, since_s=waited_s)


def recorded_collectives(evidence: Evidence) -> Iterator[Finding]:
    """By torch's flight recorders, ranks are behind in a group, or call another collective.

    They also show collectives that no Python stack shows: those of NCCL, and asynchronous ones.
    """
    groups: dict[tuple[str, str], list[tuple[WorkerEvidence, CollectiveState]]] = {}
    for role, ranks in evidence.groups.items():
        for worker in ranks:
            for state in worker.now.report.collectives if worker.now.report is not None else ():
                groups.setdefault((role, state.group), []).append((worker, state))
    for members in groups.values():
        number = max(state.number for _, state in members)
        inside = [(w, s) for w, s in members if s.number == number and not s.is_done]
        waiting = [worker for worker, _ in inside]
        waited_s, median_s = max((s.age_s for _, s in inside), default=0.0), _median(waiting)
        if waited_s < _STRUCTURAL_S or not is_long(waited_s, median_s, first_s=FLOOR_S):
            continue
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
                cause = f"{named(kinds[wanted])} entered {text}; {named(ids)} entered {kind}."
                both = [*ids, *kinds[wanted]]
                rule = "collective mismatch"
                yield Finding(rule, named(ids), cause, _BRANCH, both, [source], waited_s)
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
            if each.problem:
                rule, state = "NCCL rank lost", f"is {each.problem}"
            elif each.num_collectives < most:
                rule = "rank missing in collective"
                state = f"has called {each.num_collectives} collectives, others {most}"
            else:
                continue
            id_, process = ids.get((each.host, each.pid)), f"process {each.pid} on {each.host}"
            rank = f"rank {each.rank} of NCCL communicator {each.communicator}"
            cause = f"{id_ or process}, {rank}, {state}, by NCCL's RAS service."
            step = f"Look at {process}, and at its node's devices and links."
            yield Finding(rule, id_ or process, cause, step, [id_] if id_ is not None else [])


def _median(workers: Sequence[WorkerEvidence]) -> float | None:
    return next((each.call.median_s for each in workers if each.call is not None), None)


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
    else:
        doing = f"it {worker.doing}"
    count = "1 rank waits" if len(inside) == 1 else f"{len(inside)} ranks wait"
    waiting = f"{count} for it: {named(each.id for each in inside)}"
    cause = f"{worker.id} does not enter {entered}: {doing}. {waiting}."
    step = f"helmsman stacks shows all threads of {worker.id}. {_SAME_ORDER}."
    cpu = [] if share is None else [f"{worker.id} uses {share:.2f} cores"]
    shown = [*evidence, *cpu]
    return Finding("rank missing in collective", worker.id, cause, step, explained, shown, waited_s)


def blocked_calls(evidence: Evidence) -> Iterator[Finding]:
    """A call takes much longer than earlier ones and makes no progress."""
    for worker in evidence.busy:
        call, report, wait = worker.call, worker.now.report, worker.wait
        if call is None or not (worker.answers and worker.is_in_call):
            continue
        kind = wait.kind if wait is not None else ""
        is_alone = kind != "collective" or worker.now.world_size == 1
        is_blocked = worker.is_idle and worker.is_still
        # The first call of a method may compute for long, as a compilation does; and a task may
        # wait for a thread that serves many.
        is_thread = worker.stack is not None and worker.stack.thread != "task"
        is_endless = is_thread and worker.is_in_place and not worker.moves_data
        limits = {"factor": _FACTOR, "floor_s": FIRST_S, "first_s": math.inf}
        if not is_alone or not (
            (is_blocked and is_long(call.age_s, call.median_s, first_s=FIRST_S))
            or (is_endless and is_long(call.age_s, call.median_s, **limits))
        ):
            continue
        children = [
            f"child process {pid} is {STATES.get(state, state)}: {command[:80]}"
            for pid, (state, command) in (report.children if report is not None else {}).items()
            if state in "TZ" or kind in ("loader", "message", "process")
        ]
        frames = worker.stack.frames[-4:] if worker.stack is not None and not kind else []
        stack = [f"its stack: {place(each)}" for each in frames]
        cause = f"{call.name} on {worker.id} {worker.doing} and has not ended for "
        cause += f"{seconds(call.age_s)}."
        step = wait.next_step if wait is not None else "helmsman stacks shows all threads."
        waits_in = [f"its thread waits in {worker.waits_in}"] if worker.waits_in else []
        shown = [usual(call.median_s), *waits_in, *children[:8], *stack]
        rule = f"waits: {kind}" if kind else "no progress, cause unknown"
        yield Finding(rule, worker.id, cause, step, [worker.id], shown, call.age_s)


def slow_calls(evidence: Evidence) -> Iterator[Finding]:
    """A call takes much longer than earlier ones, but makes progress; it may be overdue."""
    for worker in evidence.busy:
        overdue = [e for e in worker.now.calls if e.limit_s is not None and e.age_s > e.limit_s]
        call = (overdue or worker.now.calls)[0]
        is_collective = worker.wait is not None and worker.wait.kind == "collective"
        if not overdue and (is_collective or not is_long(call.age_s, call.median_s)):
            continue
        cause = f"{call.name} on {worker.id} has run for {seconds(call.age_s)}; "
        cause += usual(call.median_s)
        if overdue:
            cause += f". It is overdue by the run's HangPolicy from {seconds(call.limit_s)}"
        cause += f". It {worker.doing}."
        step = "helmsman stacks shows all threads." if overdue else ""
        rule, own = "overdue call" if overdue else "slow call", [worker.id]
        is_problem = bool(overdue)
        yield Finding(rule, worker.id, cause, step, own, [], call.age_s, is_problem)
