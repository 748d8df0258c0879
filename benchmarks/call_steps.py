"""Steps of a call: their times, in microseconds and in round trips of a bare Unix socket.

Functions of script and worker are wrapped from outside to note the time; each costs about 1 us.

python -m benchmarks.call_steps [local | ray]
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import call_steps
from benchmarks.bare import EMPTY, BarePeers
from benchmarks.engines import value_of
from benchmarks.world import World
from helmsman._process.recorder import CallLog
from helmsman._wire.session import Session
from helmsman._wire.wire import FrameReader
from helmsman.controller._scheduler.calls import CallService
from helmsman.controller._scheduler.transport import client
from helmsman.rpc_server._host.threads import EngineThread
from helmsman.rpc_server._server.authenticated_server import Connection
from helmsman.rpc_server._server.channel import _Peer

_ROUNDS, _CALLS = 40, 50
_STEPS = {
    "begin": "",
    "encoded": "script: check and encode the arguments",
    "framed": "script: register, record and frame",
    "received": "send; wake the worker's reading thread; receive",
    "found": "worker: decode, find the method",
    "woken": "wake the engine thread",
    "ready": "worker: record, load the arguments",
    "answered": "worker: encode and frame the result",
    "read": "send; wake the script's event loop; receive",
    "settled": "script: decode and record",
    "awake": "wake the caller",
    "end": "script: decode the result",
}
"""Each step by the name of the moment at which it ends."""
noted: list[tuple[str, int]] = []
"""Moments, and their time.perf_counter_ns(), which the processes of a machine share."""


def note(moment: str) -> None:
    """Note that a moment is now."""
    noted.append((moment, time.perf_counter_ns()))


def wrap(owner: type, name: str, moment: str, *, is_end: bool = False) -> None:
    """Note a moment at each begin, or end, of a method."""
    plain: Callable[..., Any] = getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        if not is_end:
            note(moment)
        result = plain(*args, **kwargs)
        if is_end:
            note(moment)
        return result

    setattr(owner, name, noting)


class Engine:
    """Wraps the functions of its worker."""

    def __init__(self) -> None:
        wrap(Connection, "receive", "received", is_end=True)
        wrap(EngineThread, "submit", "found")
        wrap(CallLog, "begun", "woken")
        wrap(_Peer, "send", "answered")

    def take(self, value: Any) -> None:
        """Take a value."""
        note("ready")

    def noted(self) -> list[tuple[str, int]]:
        """Return the moments since the last call."""
        found = noted[:]
        noted.clear()
        return found


def _show(title: str, calls: list[dict[str, int]], bare: list[int]) -> None:
    print(f"\n| {title} | 10 % of calls | median | round trips |\n|---|---|---|---|")
    steps = [(_STEPS[end], begin, end) for begin, end in itertools.pairwise(_STEPS)]
    for name, begin, end in [*steps, ("the call", "begin", "end")]:
        cuts = statistics.quantiles([(each[end] - each[begin]) / 1e3 for each in calls], n=10)
        ratio = cuts[4] * 1e3 / statistics.median(bare)
        print(f"| {name} | {cuts[0]:.0f} us | {cuts[4]:.0f} us | {ratio:.1f} |")
    cuts = statistics.quantiles(bare, n=10)
    print(
        f"| a bare round trip | {cuts[0] / 1e3:.0f} us | {cuts[4] / 1e3:.0f} us | 1 |", flush=True
    )


def main(backend: str = "local") -> None:
    """Print tables of a blocking call, an awaited one, and one with an argument of 1 MB."""
    with World() as world, BarePeers(1) as peers:
        scheduler = world.workers(backend)
        world.run(scheduler.create_engine("w/0", Engine, "steps"))
        wrap(CallService, "_packed", "encoded", is_end=True)
        wrap(Session, "keep", "framed", is_end=True)
        wrap(FrameReader, "feed", "read")
        wrap(client._AwaitedCall, "_succeeded", "settled")
        wrap(client._AwaitedCall, "result", "awake")

        async def awaited() -> None:
            for _ in range(_CALLS):
                note("begin")
                await scheduler.async_call_engine("w/0", "take", "steps", None)
                note("end")

        def blocking(value: object = None) -> None:
            for _ in range(_CALLS):
                note("begin")
                scheduler.call_engine("w/0", "take", "steps", value)
                note("end")

        value = value_of("numpy", 1 << 20)
        runs: dict[str, tuple[Callable[[], object], bytes]] = {
            "blocking": (blocking, EMPTY),
            "awaited": (lambda: world.run(awaited()), EMPTY),
            "blocking, 1 MB": (lambda: blocking(value), bytes(1 << 20)),
        }
        for title, (run, data) in runs.items():
            calls: list[dict[str, int]] = []
            bare: list[int] = []
            for _ in range(_ROUNDS):
                for _ in range(_CALLS):
                    before = time.perf_counter_ns()
                    peers.round_trips(data)
                    bare.append(time.perf_counter_ns() - before)
                scheduler.call_engine("w/0", "noted", "steps")
                noted.clear()
                run()
                ours = noted[:]
                theirs = scheduler.call_engine("w/0", "noted", "steps")
                for moment, at in sorted(ours + theirs, key=lambda each: each[1]):
                    if moment == "begin":
                        calls.append({})
                    if calls and "end" not in calls[-1]:
                        calls[-1][moment] = at
            _show(title, [each for each in calls if each.keys() == _STEPS.keys()], bare)


if __name__ == "__main__":
    call_steps.main(*sys.argv[1:])  # by its name, which workers import
