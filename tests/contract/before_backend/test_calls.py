"""Forms of a call: blocking, awaited, and on event loops that it would block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._aio.event_loop import submit
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine


async def test_async_forms_of_blocking_operations(scheduler: Scheduler, role: str) -> None:
    """Async forms return and raise as the blocking forms do, on any event loop."""
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


def test_call_engine_refused_on_own_loop(engine: Engine) -> None:
    async def blocks() -> None:
        engine.call("add")

    with pytest.raises(RuntimeError, match="would wait for itself; use the non-blocking form"):
        submit(blocks()).result(timeout=LIMIT_S)

    async def awaits() -> int:
        return int(await engine.acall("add"))

    assert submit(awaits()).result(timeout=LIMIT_S) == 1


def test_close_refused_on_own_loop(make_own: Callable[..., Scheduler]) -> None:
    with make_own() as own:
        (worker,) = own.create_workers(Job(role="own"))
        engine = Engine.create(own, worker, Counter)
        kept = engine.call("add", 5, rpc_meta={"keep": True})

        async def on_our_loop(work: Callable[[], None]) -> None:
            work()

        for work in (
            own.close,
            lambda: own.delete_workers("own"),
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
        return int(engine.call("add"))  # blocks the event loop of the script alone

    assert asyncio.run(script()) == 1
