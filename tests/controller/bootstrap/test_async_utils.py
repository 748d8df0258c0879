"""Waiting for work and for being told to stop."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import pytest

from helmsman.controller._bootstrap.async_utils import StoppedError, cancelled, first, stop_signals, teller, unless


@pytest.fixture
async def stop() -> asyncio.Future[StoppedError]:
    return asyncio.get_running_loop().create_future()


class Work:
    """Goes on until it is let go; tells whether it was broken off."""

    def __init__(self) -> None:
        self.begun, self.let_go = asyncio.Event(), asyncio.Event()
        self.broken_off = False

    async def run(self) -> str:
        self.begun.set()
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # as what has to be taken back does
            self.broken_off = True
            raise
        return "done"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
async def test_a_signal_settles_it_once(number: signal.Signals, code: int) -> None:
    loop = asyncio.get_running_loop()
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    stop = stop_signals()
    try:
        os.kill(os.getpid(), number)
        stopped = await asyncio.wait_for(stop, 10.0)
        os.kill(os.getpid(), signal.SIGTERM)  # a second one, of somebody who is impatient
        await asyncio.sleep(0)
        assert (stopped.number, stopped.exit_code) == (number, code)
        assert str(stopped) == f"this node was told to stop by {number.name}"
        assert stop.result() is stopped
    finally:
        for each, handler in before.items():
            loop.remove_signal_handler(each)
            signal.signal(each, handler)


def test_who_was_told_to_stop() -> None:
    assert str(StoppedError(15, "rank 2 (gpu-2 10.0.0.3)")) == "rank 2 (gpu-2 10.0.0.3) was told to stop by SIGTERM"


async def test_work_that_ends_first(stop: asyncio.Future[StoppedError]) -> None:
    work = Work()
    work.let_go.set()
    assert await unless(stop, work.run()) == "done"
    assert not stop.done()


async def test_the_errors_of_work_pass(stop: asyncio.Future[StoppedError]) -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await unless(stop, fail())


async def test_work_is_broken_off_and_has_ended_when_that_is_told(stop: asyncio.Future[StoppedError]) -> None:
    work = Work()
    waiting = asyncio.ensure_future(unless(stop, work.run()))
    await work.begun.wait()
    stop.set_result(StoppedError(15))
    with pytest.raises(StoppedError):
        await waiting
    assert work.broken_off


async def test_work_goes_with_who_waits_for_it(stop: asyncio.Future[StoppedError]) -> None:
    work = Work()
    waiting = asyncio.ensure_future(unless(stop, work.run()))
    await work.begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.broken_off


async def test_the_first_of_several(stop: asyncio.Future[StoppedError]) -> None:
    works = [Work(), Work()]
    tasks = [asyncio.ensure_future(work.run()) for work in works]
    waiting = asyncio.ensure_future(first(*tasks, stop))
    for work in works:
        await work.begun.wait()
    assert not waiting.done()
    works[1].let_go.set()
    await waiting
    assert [task.done() for task in tasks] == [False, True]
    await cancelled(*tasks, stop)
    assert works[0].broken_off
    assert stop.cancelled()


def test_news_is_told_with_rank_and_time(capfd: pytest.CaptureFixture[str]) -> None:
    teller(3)("joined the cluster")
    assert re.fullmatch(r"\[helmsman up, rank 3, \d\d:\d\d:\d\d\] joined the cluster\n", capfd.readouterr().err)
