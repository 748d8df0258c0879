"""Calls from many threads and after forks, and calls of workers that are deleted or closed."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler
from tests.contract.engines import Counter, Forking, hold_memory
from tests.contract.helpers import LIMIT_S, Driver, Engine, Gate, is_running, wait_until
from tests.contract.marks import needs_processes, ray_smoke


@ray_smoke
def test_calls_from_threads_and_loop(engine: Engine, peer: Engine) -> None:
    from_threads, from_loop = 40, 40

    async def many() -> None:
        await asyncio.gather(
            *(target.acall("add") for target in (engine, peer) for _ in range(from_loop))
        )

    with ThreadPoolExecutor(16) as pool:
        futures = [
            pool.submit(target.call, "add")
            for target in (engine, peer)
            for _ in range(from_threads)
        ]
        asyncio.run(many())
        results = [future.result(timeout=LIMIT_S) for future in futures]
    assert len(results) == 2 * from_threads
    assert engine.call("add", 0) == peer.call("add", 0) == from_threads + from_loop


def test_delete_workers_destroys_engines(scheduler: Scheduler, role: str, tmp_path: Path) -> None:
    workers = scheduler.create_workers(Job(role=role, replicas=2))
    for index, worker in enumerate(workers):
        Engine.create(scheduler, worker, Counter).call(
            "announce_destroy", str(tmp_path / str(index))
        )
    scheduler.delete_workers(role, reverse_order=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@needs_processes
def test_delete_workers_rank_zero_last(scheduler: Scheduler, role: str) -> None:
    ids = scheduler.create_workers(Job(role=role, replicas=3))
    engines = [Engine.create(scheduler, worker, Counter) for worker in ids]
    pidfds = {engine.worker_id: os.pidfd_open(engine.call("pid")) for engine in engines}
    for engine in engines[1:]:
        engine.call("apply", hold_memory, 200_000_000)  # which takes time to free

    def left() -> list[str]:
        ended = select.select(list(pidfds.values()), [], [], 0)[0]
        return [worker for worker, pidfd in pidfds.items() if pidfd not in ended]

    def left_by_rank_zero() -> list[str]:
        select.select([pidfds[ids[0]]], [], [], LIMIT_S)
        return left()

    with ThreadPoolExecutor() as pool:
        watching = pool.submit(left_by_rank_zero)
        scheduler.delete_workers(role, reverse_order=True)
        assert left() == [], "all processes have exited when it returns"
        assert watching.result() == [], "the others exited before rank 0"
    for pidfd in pidfds.values():
        os.close(pidfd)


@pytest.mark.parametrize(("method", "raises"), [("fork", True), ("afork", False)])
def test_engine_fork_executes_no_calls(
    scheduler: Scheduler, shared_workers: list[str], tmp_path: Path, method: str, raises: bool
) -> None:
    engine = Engine.create(scheduler, shared_workers[0], Forking, f"forking-{method}-{raises}")
    path = tmp_path / "executed"
    forked = engine.begin(method, raises)
    # These calls are queued when the worker forks.
    answers = [engine.begin("note", str(path), number) for number in range(10)]
    child = forked.result(LIMIT_S)
    assert child > 0
    assert [answer.result(LIMIT_S) for answer in answers] == list(range(10))
    wait_until(lambda: not is_running(child), "the child has exited")
    assert sorted(map(int, path.read_text().split())) == list(range(10))


@ray_smoke
def test_script_fork_cannot_use_scheduler(engine: Engine) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.raises(
                errors.SchedulerClosedError, match="forked child .* Make the call there"
            ):
                engine.call("add", timeout=1)
            engine.scheduler.close()
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert engine.call("add") == 1


AFTER_MAIN = """
import threading

import numpy as np

from tests.contract.helpers import Engine

def call():
    threading.main_thread().join()
    called = engine.call("echo", value)
    awaited = asyncio.run(engine.acall("echo", value))
    tell(sums=[int(called.sum()), int(awaited.sum())])

if __name__ == "__main__":
    scheduler = make()
    value = np.ones(1 << 22, np.uint8)
    engine = Engine.create(scheduler, scheduler.create_workers(Job(role="a"))[0], engines.Counter)
    threading.Thread(target=call).start()
"""


def test_calls_do_not_leak(engine: Engine) -> None:
    def blocks_after(num_calls: int) -> int:
        for _ in range(num_calls):
            engine.call("echo", [1, "two"])
        gc.collect()
        return sys.getallocatedblocks()

    blocks_after(300)
    before = blocks_after(300)
    assert blocks_after(600) - before < 300, "a leak would take a block per call or more"


def test_calls_after_main_thread_ended(run_driver: Callable[..., Driver]) -> None:
    driver = run_driver(AFTER_MAIN)
    assert driver.facts() == {"sums": [1 << 22, 1 << 22]}
    assert driver.wait() == 0


@needs_processes
def test_close_during_a_call(make_own: Callable[..., Scheduler], gate: Gate) -> None:
    scheduler = make_own()
    (worker,) = scheduler.create_workers(Job(role="a"))
    engine = Engine.create(scheduler, worker, Counter)
    outcome: list[BaseException] = []

    def call() -> None:
        try:
            engine.call("wait", *gate.files)
        except errors.HelmsmanError as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    gate.wait_started()
    scheduler.close()
    thread.join(LIMIT_S)
    assert [type(error) for error in outcome] == [errors.WorkerFailedError]
