"""Calls: order, threads, many callers at once, the environment, and what a scheduler does once it
is closed.
"""

from __future__ import annotations

import asyncio
import functools
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.controller._aio.event_loop import submit
from tests.contract.engines import Counter, Forking, hold_memory
from tests.contract.helpers import LIMIT_S, Driver, Engine, Gate, is_running, wait_until


def test_create_engines_in_all_workers(
    scheduler: Scheduler, shared_workers: list[str], role: str
) -> None:
    """Workers may be given as ids or as themselves; one failure is raised once all have ended."""
    workers = scheduler.get_workers("shared")
    scheduler.create_engines(workers, Counter, role, 3)
    assert [scheduler.call_engine(each, "add", role, 2) for each in workers] == [5, 5]
    asyncio.run(scheduler.async_create_engines(shared_workers[:1], Counter, f"{role}-x", 4))
    with pytest.raises(errors.EngineExistsError, match=f"{role}-x"):
        scheduler.create_engines(shared_workers, Counter, f"{role}-x", 4)
    assert scheduler.call_engine(shared_workers[1], "add", f"{role}-x", 1) == 5
    with pytest.raises(TypeError, match="create_engines: the argument worker_ids is 7"):
        scheduler.create_engines(7, Counter)  # type: ignore[arg-type]


async def test_async_forms_of_blocking_operations(scheduler: Scheduler, role: str) -> None:
    """They have the results and errors of the blocking forms, beside a caller's event loop."""
    workers = await scheduler.async_create_workers(Job(role=role))
    assert workers == [f"{role}/0"]
    assert [each.id for each in await scheduler.async_get_workers(role, timeout=0)] == workers
    assert workers[0] in {each.worker_id for each in await scheduler.async_status()}
    handle = await scheduler.async_put([1, 2])
    assert await scheduler.async_get(handle) == [1, 2]
    await scheduler.async_release(handle)
    await scheduler.async_delete_workers(role)
    with pytest.raises(errors.RoleNotFoundError, match=role):
        await scheduler.async_delete_workers(role)


def test_create_engine_default_name(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    asyncio.run(scheduler.create_engine(worker, Counter, None, 3))
    assert (
        scheduler.call_engine(worker, "add") == scheduler.call_engine(worker, "add", worker, 0) == 4
    )
    asyncio.run(scheduler.create_engine(worker, "tests.contract.engines.Counter", "by-path", 7))
    asyncio.run(scheduler.create_engine(worker, "tests.contract.engines:Counter", "by-colon"))
    assert scheduler.call_engine(worker, "add", "by-path") == 8


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


def test_call_engine_refused_on_own_loop(engine: Engine) -> None:
    async def blocks() -> None:
        engine.call("add")

    with pytest.raises(RuntimeError, match="would wait for itself; use the non-blocking form"):
        submit(blocks()).result(timeout=LIMIT_S)

    async def awaits() -> int:
        return int(await engine.acall("add"))

    assert submit(awaits()).result(timeout=LIMIT_S) == 1


def test_close_refused_on_own_loop(backend: str, make_own: Callable[..., Scheduler]) -> None:
    with make_own() as own:
        (worker,) = own.create_workers(Job(role=f"own-{backend}"))
        engine = Engine.create(own, worker, Counter)
        kept = engine.call("add", 5, rpc_meta={"keep": True})

        async def on_our_loop(work: Callable[[], None]) -> None:
            work()

        for work in (
            own.close,
            lambda: own.delete_workers(f"own-{backend}"),
            own.delete_workers,
            lambda: own.release(kept),
        ):
            with pytest.raises(RuntimeError, match=r"await asyncio\.to_thread\(scheduler\.close\)"):
                submit(on_our_loop(work)).result(timeout=LIMIT_S)
            assert engine.call("add", 0) == 5, "nothing has ended"
        assert own.get(kept) == 5

        async def close() -> None:
            await asyncio.to_thread(own.close)

        submit(close()).result(timeout=LIMIT_S)
        with pytest.raises(errors.SchedulerClosedError):
            engine.call("add")


def test_call_engine_in_async_script(engine: Engine) -> None:
    async def script() -> int:
        return int(engine.call("add"))  # it blocks the script's own loop, and only that

    assert asyncio.run(script()) == 1


@pytest.mark.not_on("inline", "one process, with one environment")
def test_environment_of_each_task(scheduler: Scheduler, role: str) -> None:
    specs = [SchedulingSpec(env_vars={"CONTRACT_RANK": str(rank)}) for rank in range(2)]
    workers = scheduler.create_workers(Job(role=role, replicas=2, tasks=specs))
    engines = [Engine.create(scheduler, worker, Counter) for worker in workers]
    assert [engine.call("environ", "CONTRACT_RANK")["CONTRACT_RANK"] for engine in engines] == [
        "0",
        "1",
    ]
    assert len({engine.call("pid") for engine in engines}) == 2


def test_delete_workers_destroys_engines(scheduler: Scheduler, role: str, tmp_path: Path) -> None:
    workers = scheduler.create_workers(Job(role=role, replicas=2))
    for index, worker in enumerate(workers):
        Engine.create(scheduler, worker, Counter).call(
            "announce_destroy", str(tmp_path / str(index))
        )
    scheduler.delete_workers(role, reverse_order=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.not_on("inline", "its workers share the script's process")
def test_delete_workers_rank_zero_last(scheduler: Scheduler, role: str) -> None:
    ids = scheduler.create_workers(Job(role=role, replicas=3))
    engines = [Engine.create(scheduler, worker, Counter) for worker in ids]
    pidfds = {engine.worker_id: os.pidfd_open(engine.call("pid")) for engine in engines}
    for engine in engines[1:]:
        engine.call("apply", hold_memory, 200_000_000)  # which takes a while to free

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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("method", ["fork", "afork"])
@pytest.mark.parametrize("raises", [False, True])
def test_engine_fork_executes_no_calls(
    scheduler: Scheduler, shared_workers: list[str], tmp_path: Path, method: str, raises: bool
) -> None:
    engine = Engine.create(scheduler, shared_workers[0], Forking, f"forking-{method}-{raises}")
    path = tmp_path / "executed"
    forked = engine.begin(method, raises)
    # they are queued when the worker is forked
    answers = [engine.begin("note", str(path), number) for number in range(10)]
    child = forked.result(LIMIT_S)
    assert child > 0
    assert [answer.result(LIMIT_S) for answer in answers] == list(range(10))
    wait_until(lambda: not is_running(child), "the child has exited")
    assert sorted(map(int, path.read_text().split())) == list(range(10))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
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


def test_calls_after_main_thread_ended(run_driver: Callable[..., Driver]) -> None:
    driver = run_driver(AFTER_MAIN)
    assert driver.facts() == {"sums": [1 << 22, 1 << 22]}
    assert driver.wait() == 0


@pytest.mark.not_on("inline", "one process, whose engines cannot be ended in the middle of a call")
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


def test_create_engine_by_callable(scheduler: Scheduler, shared_workers: list[str]) -> None:
    name = "made-by-a-partial"
    asyncio.run(
        scheduler.create_engine(shared_workers[0], functools.partial(Counter, start=3), name)
    )
    assert scheduler.call_engine(shared_workers[0], "add", name) == 4


def test_plan_takes_mapping_values(scheduler: Scheduler) -> None:
    jobs = {name: Job(role=name, tasks=[SchedulingSpec(cpu=0.1)]) for name in ("one", "other")}
    assert [role.role for role in scheduler.plan(jobs.values()).roles] == ["one", "other"]
