"""Soak test of a rollout on processes: random faults, scaling and weight updates beside requests.

Events are drawn from a seed and occur after a number of ended requests, never at a time, so a seed
replays its schedule on any machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import psutil

from helmsman._base.event_loop import background_loop
from helmsman.api.errors import HelmsmanError, RequestDeadlineError
from helmsman.api.generation import GenerationResult
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, Timeouts
from helmsman.controller._rollout.health import Health, SupervisionPolicy
from helmsman.controller._rollout.request import RequestOptions, RequestState
from helmsman.controller._rollout.retries import RetryGeneration
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._scheduler.factory import make_scheduler
from helmsman.rpc_server._host.threads import task_stack
from helmsman.testing import Fault, FaultPlan, Hang, Kill
from tests.contract.helpers import wait_until
from tests.unit.controller.rollout.invariants import end_of
from tests.unit.controller.rollout.pure_rollout import MAX_NEW_TOKENS, make_request, tokens_of

NUM_WORKERS = 8
MOST_WORKERS = 10
PAUSE_S = 0.002
MEAN_GAPS = {
    "kill": 300,
    "hang": 600,
    "abort": 300,
    "pause": 600,
    "scale": 600,
    "update": 300,
}
"""Mean number of requests between two events of a kind.

Events of one kind run one after another; events of different kinds overlap.
"""
LIMIT_S = 60.0
"""Limit of all waits, in seconds."""
POLICY = SupervisionPolicy(
    probe_every_s=0.1,
    suspect_s=0.5,
    dead_s=1.5,
    max_restarts=1_000_000,
    restart_window_s=1.0,
    restart_pause_s=0.01,
)


class Request(NamedTuple):
    """A submitted request."""

    number: int
    length: int
    oldest: int
    """Version of the last update that completed before the request; its tokens are not older."""


class Soak:
    """One run of a seed."""

    def __init__(self, scheduler: Scheduler, seed: int, num: int, gap_divisor: int) -> None:
        self.scheduler, self.seed, self.num = scheduler, seed, num
        self.gap_divisor = gap_divisor
        self.rollout = RolloutController(
            scheduler,
            "tests.unit.controller.rollout.pure_rollout.PureRollout",
            Job(role="rollout", replicas=NUM_WORKERS, tasks=[SchedulingSpec(cpu=0.1)]),
            engine_args=(PAUSE_S,),
            max_in_flight_per_worker=16,
            max_in_flight=100,
            max_queue=100,
            retries=RetryGeneration(50),
            supervision=POLICY,
        )
        self.begun = self.complete = 0
        """Versions of the last update that has begun, and of the last that is complete."""
        self.num_ended = 0
        self.num_ends = bytearray(num)
        """Number of ends of each request."""
        self.ends: Counter[RequestState] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.num_submitted = 0
        """Number of the newest request."""
        self.changed = threading.Condition()
        self.sizes: list[tuple[int, int]] = []
        """Bytes in memory and objects of this process, at each quarter."""

    # --- requests ---------------------------------------------------------------------------------

    def submit_all(self) -> None:
        source = random.Random(f"requests/{self.seed}")
        for number in range(self.num):
            self.submit(number, source)

    def submit(self, number: int, source: random.Random) -> None:
        length = min(1 + int(source.lognormvariate(2.0, 1.0)), MAX_NEW_TOKENS)
        options = RequestOptions(
            priority=source.choice((0, 0, 0, 1)),
            deadline_s=source.uniform(0.01, 3.0) if source.random() < 0.02 else None,
            expected_tokens=length,
        )
        cancels = source.random() < 0.01
        request = Request(number, length, self.complete)
        self.num_submitted = number
        future = self.rollout.submit(make_request(f"r{number}", number, length), None, options)
        future.add_done_callback(lambda future: self.ended(request, future))
        if cancels:
            future.cancel()

    def ended(self, request: Request, future: Future[GenerationResult]) -> None:
        """Record and check the end of a request; called in any thread.

        Errors are collected, since a callback of a future cannot raise.
        """
        with self.changed:
            try:
                state = end_of(future, request.length, range(request.oldest, self.begun + 1))
                if state in (RequestState.DONE, RequestState.PARTIAL):
                    result = future.result()
                    assert result.request_id == f"r{request.number}", result
                    assert result.token_ids == tokens_of(request.number, result.versions), (
                        f"other tokens: {result}"
                    )
                elif state is RequestState.FAILED:
                    assert isinstance(future.exception(), RequestDeadlineError), (
                        "requests of dead workers are retried"
                    )
                self.ends[state] += 1
            except AssertionError as error:
                self.problems.append(f"request {request}: {error!r}")
            self.num_ends[request.number] += 1
            self.num_ended += 1
            self.changed.notify_all()

    def wait_ended(self, num: int) -> None:
        """Wait until ``num`` requests have ended; fail if none ends for LIMIT_S."""
        is_moving = True
        while is_moving and (before := self.num_ended) < num:
            with self.changed:
                is_moving = self.changed.wait_for(
                    lambda before=before: self.num_ended > before,  # type: ignore[misc]
                    LIMIT_S,
                )
        assert is_moving, f"{self.num_ended} of {num} requests have ended.\n{self.describe()}"

    # --- events -----------------------------------------------------------------------------------

    def live(self, kind: str) -> None:
        """Run the events of a kind, one after another."""
        source, at = random.Random(f"{kind}/{self.seed}"), 0
        rate = self.gap_divisor / MEAN_GAPS[kind]
        try:
            while (at := at + 1 + int(source.expovariate(rate))) < 0.95 * self.num:
                self.wait_ended(at)
                getattr(self, kind)(source, at)
                self.outcomes[kind] += 1
        except Exception as error:  # noqa: BLE001 - shown by the test, which runs in another thread
            self.problems.append(f"{kind} at {at}: {''.join(traceback.format_exception(error))}")

    def inject(self, fault: Fault) -> None:
        (record,) = FaultPlan([fault]).begin(self.scheduler).step(0)
        self.outcomes[f"{type(fault).__name__}: {record.outcome if record.done else 'none'}"] += 1

    def worker(self, source: random.Random) -> str:
        return source.choice(self.rollout.workers).id

    def kill(self, source: random.Random, at: int) -> None:
        self.inject(Kill(self.worker(source), at_step=0))

    def hang(self, source: random.Random, at: int) -> None:
        self.inject(Hang(self.worker(source), at_step=0, seconds=source.choice((None, 0.7))))

    def abort(self, source: random.Random, at: int) -> None:
        """Abort some of the requests that are open now."""
        newest = self.num_submitted
        numbers = [max(0, newest - source.randrange(60)) for _ in range(source.choice((5, 30)))]
        self.outcomes["requests aborted"] += self.rollout.abort(
            [f"r{number}" for number in numbers]
        )

    def pause(self, source: random.Random, at: int) -> None:
        """Check that no request starts during a pause, although instances die and return."""
        self.rollout.pause()
        try:
            most = self.in_flight()
            deadline = time.monotonic() + LIMIT_S
            while most and time.monotonic() < deadline:
                num = self.in_flight()
                assert num <= most, "a request was sent during a pause"
                most = num
            assert most == 0
        finally:
            self.rollout.resume()

    def in_flight(self) -> int:
        return sum(each.num_in_flight for each in self.rollout.stats().instances.values())

    def scale(self, source: random.Random, at: int) -> None:
        try:
            self.rollout.scale(
                source.randint(NUM_WORKERS // 2, MOST_WORKERS), migrate=source.random() < 0.5
            )
        except HelmsmanError as error:  # A new worker was killed before it served.
            self.outcomes[f"scale: {type(error).__name__}"] += 1

    def update(self, source: random.Random, at: int) -> None:
        self.begun += 1
        weights = {"version": self.begun}
        self.rollout.update_weights(
            self.scheduler.put(weights) if source.random() < 0.5 else weights, self.begun
        )
        self.complete = self.begun

    # --- run --------------------------------------------------------------------------------------

    def run(self) -> None:
        threads = [
            threading.Thread(target=self.live, args=(kind,), name=kind, daemon=True)
            for kind in MEAN_GAPS
        ]
        threads.append(threading.Thread(target=self.submit_all, name="submit", daemon=True))
        for thread in threads:
            thread.start()
        for quarter in range(1, 5):
            self.wait_ended(quarter * self.num // 4)
            self.measure()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), f"{thread.name} does not end.\n{self.describe()}"

    def describe(self) -> str:
        """Return problems, outcomes and the stacks of waiting tasks, for a failure message."""

        async def stacks() -> list[str]:
            return [task_stack(task) for task in asyncio.all_tasks()]

        tasks = asyncio.run_coroutine_threadsafe(stacks(), background_loop()).result(10.0)
        return "\n\n".join([*self.problems, str(self.outcomes), str(self.rollout.stats()), *tasks])

    def measure(self) -> None:
        gc.collect()
        self.sizes.append((psutil.Process().memory_info().rss, len(gc.get_objects())))

    def all_serve(self) -> bool:
        return all(each.state is Health.HEALTHY for each in self.rollout.stats().instances.values())

    def settle(self) -> None:
        """Return to the initial number of workers, and wait until all serve."""
        self.rollout.scale(NUM_WORKERS)
        wait_until(self.all_serve, "all serve again", LIMIT_S)


@contextlib.contextmanager
def errors_logged() -> Iterator[list[str]]:
    """Collect error logs, such as those of tasks whose exception was never retrieved."""
    logged: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(self.format(record))

    handler = Handler(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield logged
    finally:
        logging.getLogger().removeHandler(handler)


def num_descriptors() -> int:
    """Return the number of open descriptors of this process, except segments, which are cached."""
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return len(
        [
            path
            for path in paths
            if os.path.lexists(path) and "memfd:helmsman" not in os.readlink(path)
        ]
    )


def family() -> dict[int, str]:
    """Return name by pid of all descendants of this process, zombies included."""
    return {each.pid: each.name() for each in psutil.Process().children(recursive=True)}


def run_and_check(folder: Path, seed: int, num: int, gap_divisor: int = 1) -> Soak:
    """Run a soak on processes, and check that each request has ended once and nothing is left.

    Args:
        folder: Folder for logs.
        seed: Seed of all random draws.
        num: Number of requests.
        gap_divisor: Divisor of MEAN_GAPS.
    """
    with make_scheduler("local", log_dir=folder / "first", preload=()) as scheduler:
        # Some resources of the first run stay open, such as the event loop.
        scheduler.create_workers(Job(role="a"))
    before, descriptors_before = family(), num_descriptors()
    timeouts = Timeouts(health_s=2.0)
    with (
        errors_logged() as errors,
        make_scheduler("local", log_dir=folder, timeouts=timeouts, preload=()) as scheduler,
    ):
        soak = Soak(scheduler, seed, num, gap_divisor)
        with soak.rollout:
            soak.rollout.initialize()
            family_at_start, descriptors_at_start = family(), num_descriptors()
            soak.run()
            print(dict(soak.ends), dict(soak.outcomes), soak.sizes)
            soak.settle()
            load = soak.rollout.stats()
            versions = soak.rollout.versions()
            last = soak.rollout.generate([make_request(f"last{i}", i, 5) for i in range(64)])
            wait_until(
                lambda: Counter(family().values()) == Counter(family_at_start.values()),
                "there are no further processes and no zombies",
            )
            assert num_descriptors() <= descriptors_at_start + 8
    assert not soak.problems, "\n".join(soak.problems[:10])
    assert set(MEAN_GAPS) <= set(soak.outcomes), "each kind of event has happened"
    assert soak.num_ends == bytearray([1]) * num, "each request has ended once"
    assert soak.ends.total() == num
    assert soak.ends[RequestState.DONE] > 0.8 * num
    assert (load.num_queued, load.paused) == (0, False)
    assert {(each.num_in_flight, each.outstanding_tokens) for each in load.instances.values()} == {
        (0, 0)
    }
    assert len(load.instances) == NUM_WORKERS
    assert versions == dict.fromkeys(load.instances, soak.begun)
    assert {version for result in last for version in result.versions} == {soak.begun}
    assert errors == []
    wait_until(lambda: family().keys() <= before.keys(), "all processes have ended")
    assert num_descriptors() <= descriptors_before
    return soak
