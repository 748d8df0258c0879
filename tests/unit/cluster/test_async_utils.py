"""Tests of stop_signals, unless and status_printer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal

import pytest

from helmsman._cluster.async_utils import (
    StoppedError,
    status_printer,
    stop_signals,
    unless,
)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.parametrize(("number", "code"), list(zip(SIGNALS, (143, 130, 129), strict=True)))
async def test_stop_signals(number: signal.Signals, code: int) -> None:
    loop = asyncio.get_running_loop()
    before = {each: signal.getsignal(each) for each in SIGNALS}
    stop = stop_signals()
    try:
        os.kill(os.getpid(), number)
        stopped = await asyncio.wait_for(stop, 10.0)
        os.kill(os.getpid(), signal.SIGTERM)  # a second signal changes nothing
        await asyncio.sleep(0)
        assert (stopped.number, stopped.exit_code) == (number, code)
        assert str(stopped) == f"this node received {number.name}"
        assert stop.result() is stopped
    finally:
        for each, handler in before.items():
            loop.remove_signal_handler(each)
            signal.signal(each, handler)


@pytest.mark.parametrize("ends_by", ["itself", "an error", "stop", "its caller"])
async def test_unless(ends_by: str) -> None:
    """unless() returns after the end of its work, also when the work is cancelled."""
    stop: asyncio.Future[StoppedError] = asyncio.get_running_loop().create_future()
    begun, released = asyncio.Event(), asyncio.Event()
    events: list[str] = []

    async def work() -> str:
        begun.set()
        try:
            await released.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # the work awaits its clean-up
            events.append("cancelled")
            raise
        if ends_by == "an error":
            raise KeyError("x")
        return "done"

    waiting = asyncio.ensure_future(unless(stop, work()))
    await begun.wait()
    if ends_by == "stop":
        stop.set_result(StoppedError(15))
    elif ends_by == "its caller":
        waiting.cancel()
    else:
        released.set()
    errors = {"an error": KeyError, "stop": StoppedError, "its caller": asyncio.CancelledError}
    with pytest.raises(errors[ends_by]) if ends_by in errors else contextlib.nullcontext():
        assert await waiting == "done"
    assert events == (["cancelled"] if ends_by in ("stop", "its caller") else [])


def test_status_printer(capfd: pytest.CaptureFixture[str]) -> None:
    status_printer(3)(f"{StoppedError(15, 'rank 2')}")
    pattern = r"\[helmsman up, rank 3, \d\d:\d\d:\d\d\] rank 2 received SIGTERM\n"
    assert re.fullmatch(pattern, capfd.readouterr().err)
