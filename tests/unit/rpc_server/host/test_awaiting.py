"""Tests of the wait of a task, through tasks, event loops and threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from helmsman._base.loops import start_loop
from helmsman.rpc_server._host.awaiting import TaskWait, Threads, waiting_of


async def event() -> None:
    await asyncio.Event().wait()


async def lock() -> None:
    mutex = asyncio.Lock()
    await mutex.acquire()
    async with mutex:
        pass


async def gathered() -> None:
    await asyncio.gather(asyncio.sleep(0), event())


async def grouped() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(event())


async def limited() -> None:
    await asyncio.wait_for(event(), 1e6)


async def shielded() -> None:
    await asyncio.shield(event())


async def waited() -> None:
    await asyncio.wait([asyncio.ensure_future(event())])


async def other_task() -> None:
    await asyncio.create_task(event())


async def events() -> AsyncIterator[int]:
    await event()
    yield 1


async def iterated() -> None:
    async for _ in events():
        pass


async def future() -> None:
    await asyncio.get_running_loop().create_future()


async def sleep() -> None:
    await asyncio.sleep(1e9)


async def other_loop() -> None:
    loop, _ = start_loop("another")
    try:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(event(), loop))
    finally:
        loop.call_soon_threadsafe(loop.stop)


async def wait_in(workflow: Callable[[], Awaitable[None]]) -> TaskWait:
    """Return the wait of a coroutine once its stack does not change."""
    task = asyncio.ensure_future(workflow())
    key: object = None
    try:
        while True:
            await asyncio.sleep(0.05)
            found = waiting_of(task, Threads())
            if key == found.key and not found.is_ready:
                return found
            key = found.key
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("workflow", "text"),
    [
        (event, "awaits Event.wait at test_awaiting.py:"),
        (lock, "awaits Lock.acquire at test_awaiting.py:"),
        (gathered, "awaits Event.wait at"),
        (grouped, "awaits Event.wait at"),
        (limited, "awaits Event.wait at"),
        (shielded, "awaits Event.wait at"),
        (waited, "awaits Event.wait at"),
        (other_task, "awaits Event.wait at"),
        (iterated, "awaits Event.wait at"),
        (other_loop, "awaits Event.wait at"),
        (future, "awaits a Future at"),
        (sleep, "sleeps for 1e+09 s at"),
    ],
)
def test_wait_is_found(workflow: Callable[[], Awaitable[None]], text: str) -> None:
    found = asyncio.run(wait_in(workflow))
    assert found.text().startswith(text)
    assert found.thread is None
    names = [each.function for each in found.stack().frames]
    assert names[0] == workflow.__name__


def test_wait_in_a_thread() -> None:
    done = threading.Event()

    async def threaded() -> None:
        await asyncio.to_thread(done.wait)

    async def main() -> TaskWait:
        try:
            return await wait_in(threaded)
        finally:
            done.set()

    found = asyncio.run(main())
    assert found.thread is not None
    assert found.text().startswith(f"runs in thread {found.thread.name} at test_awaiting.py:")


def test_task_that_blocks_its_loop() -> None:
    blocked, done = threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        done.wait()

    loop, thread = start_loop("blocked")
    tasks = list[asyncio.Task[None]]()

    def begin() -> None:
        tasks.extend(loop.create_task(each) for each in (block(), event()))

    loop.call_soon_threadsafe(begin)
    blocked.wait()
    try:
        first, second = (waiting_of(each, Threads()) for each in tasks)
    finally:
        done.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    assert first.blocks_loop
    assert first.text().startswith("blocks the event loop of thread blocked at test_awaiting.py:")
    assert second.is_explained
    assert second.text() == "is ready, but its event loop does not run it"


def test_new_future_is_progress() -> None:
    async def main() -> tuple[TaskWait, TaskWait]:
        step = [asyncio.get_running_loop().create_future() for _ in range(2)]

        async def steps() -> None:
            for each in step:
                await each

        task = asyncio.ensure_future(steps())
        await asyncio.sleep(0)
        found = [waiting_of(task, Threads())]
        step[0].set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        found.append(waiting_of(task, Threads()))
        assert found[1].key == waiting_of(task, Threads()).key
        step[1].set_result(None)
        await task
        return found[0], found[1]

    before, after = asyncio.run(main())
    assert before.text() == after.text()
    assert before.key != after.key


def test_failed_task_is_named() -> None:
    async def starts_task() -> None:
        async def finish() -> None:
            raise RuntimeError("no event")

        task = asyncio.create_task(finish())
        try:
            await event()
        finally:
            task.exception()  # asyncio would log it at some later garbage collection

    async def main() -> str:
        return (await wait_in(starts_task)).text(source=True)

    text = asyncio.run(main())
    assert "(await asyncio.Event().wait()), and its task " in text
    assert text.endswith("finish has raised RuntimeError('no event')")


def test_threads_touch_no_objects_of_the_user() -> None:
    """A configuration whose attributes are its keys raises KeyError for others."""

    class Box(dict[str, int]):
        __getattr__ = dict.__getitem__

    def run(config: Box) -> Threads:
        assert config["lr"] == 1
        return Threads()

    assert run(Box(lr=1)) is not None
