"""Cost of the flight recorder, and of questions about a run of 1,000 workers.

The workers are simulated: threads of one process, each with a call that does not end.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Pair, case
from benchmarks.world import World
from helmsman import InlineScheduler
from helmsman._base.event_loop import run_sync
from helmsman._desk.diagnosis import diagnose_run
from helmsman._desk.runs import FoundRun, find_run, take_snapshot, take_two
from helmsman._process.recorder import Recorder
from helmsman.api.observer import Kind
from helmsman.api.scheduler import Call, Job, SchedulingSpec

NUM_WORKERS = 1000
EVENTS = 10_000
EVENT_LIMIT_US, STATUS_LIMIT_S, WHY_LIMIT_S = 2.0, 2.0, 10.0


CALLS = 2000


class Switch:
    """Turns the recording of this process's calls on and off."""

    def __init__(self) -> None:
        self.is_on = True
        for name in ("note", "finish"):
            setattr(Recorder, name, self._switched(getattr(Recorder, name)))

    def _switched(self, record: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: record(*arguments) if self.is_on else 0


class Recorded:
    """An engine with an empty call, which turns the recording of the next one on or off."""

    def __init__(self) -> None:
        self._switch = Switch()

    def ping(self, is_on: bool) -> None:
        self._switch.is_on = is_on


class Waiting:
    """An engine whose call ends with the case."""

    ended = threading.Event()

    def step(self) -> None:
        self.ended.wait()


def _run(world: World) -> FoundRun:
    """Make a run of 1,000 workers that are all in a call."""
    Waiting.ended.clear()
    folder = world.until_case_ends.enter_context(tempfile.TemporaryDirectory())
    scheduler = InlineScheduler(log_dir=Path(folder) / "logs")
    world.until_case_ends.callback(scheduler.close)
    world.until_case_ends.callback(Waiting.ended.set)
    spec = SchedulingSpec(cpu=0.001)
    ids = scheduler.create_workers(Job(role="actor", replicas=NUM_WORKERS, tasks=[spec]))
    scheduler.create_engines(ids, Waiting)

    async def begin() -> None:
        scheduler.call_many({each: Call((), {}, None) for each in ids}, "step")

    run_sync(begin())
    return find_run(scheduler.run_id)


@case("operator.event", unit="us", floor="limit of 2 us", goal="<= 1")
def event(world: World) -> Pair:
    folder = world.until_case_ends.enter_context(tempfile.TemporaryDirectory())
    recorder = Recorder("a/0")
    recorder.persist_at(f"{folder}/a-0", "0123456789")
    recorder.renew()
    world.until_case_ends.callback(recorder.close)
    name = recorder.name("a/0.step")

    def record() -> None:
        for number in range(EVENTS):
            recorder.note(Kind.BEGUN, name, number)

    return Pair(ours=record, floor=EVENT_LIMIT_US, per_run=EVENTS, repeats=5)


@case("operator.recorder", unit="us", floor="an empty call without the recorder")
def recorder(world: World) -> Pair:
    """Measure a call that both sides record."""
    scheduler = world.scheduler("local")
    job = Job(role="recorded", replicas=1, tasks=[SchedulingSpec(cpu=0.1)])
    (worker,) = scheduler.create_workers(job)
    world.until_case_ends.callback(scheduler.delete_workers, "recorded")
    scheduler.create_engines([worker], Recorded)

    switch = Switch()
    figures: dict[bool, list[float]] = {True: [], False: []}

    def take_turns() -> None:
        # The sides alternate call by call: over longer times, the speed of a machine varies by more
        # than the cost of the recorder.
        took: dict[bool, list[float]] = {True: [], False: []}
        for number in range(CALLS):
            switch.is_on = is_on = number % 2 == 0
            started = time.perf_counter()
            scheduler.call_engine(worker, "ping", None, not is_on)
            took[is_on].append(time.perf_counter() - started)
        for is_on, durations in took.items():
            figures[is_on].append(statistics.median(durations))

    def figure(is_on: bool) -> float:
        if not figures[is_on]:
            take_turns()
        return figures[is_on].pop()

    return Pair(
        ours=lambda: figure(True), floor=lambda: figure(False), rounds=20, returns_figure=True
    )


@case("operator.status_1000", unit="s", floor="limit of 2 s", goal="<= 1")
def status(world: World) -> Pair:
    run = _run(world)
    return Pair(ours=lambda: take_snapshot(run, reports=False), floor=STATUS_LIMIT_S)


@case("operator.why_1000", unit="s", floor="limit of 10 s", goal="<= 1")
def why(world: World) -> Pair:
    run = _run(world)
    return Pair(ours=lambda: diagnose_run(*take_two(run)), floor=WHY_LIMIT_S, rounds=3)
