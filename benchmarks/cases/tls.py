"""Cost of TLS for small calls to workers of other machines, compared with plain TCP and the Unix
socket of one machine.

All three connect to workers of this machine, so no network hides the difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks.harness import RATE, Pair, case
from benchmarks.world import ENGINE, World
from helmsman._wire.tls import server_tls

PAYLOAD = bytes(32 * 1024)
IN_FLIGHT = 500


def _compare(name: str, backend: str) -> None:
    floor = "the same by plain TCP (HELMSMAN_TLS=0)"

    def latency(world: World, *arguments: bytes) -> Pair:
        ours, plain = world.workers(backend), world.workers("ray_tcp")
        method = "take" if arguments else "ping"
        return Pair(
            ours=lambda: ours.call_engine("w/0", method, ENGINE, *arguments),
            floor=lambda: plain.call_engine("w/0", method, ENGINE, *arguments),
            rounds=15,
            repeats=60,
            warm_up=50,
        )

    @case(f"tls.{name}.sync", unit="us", floor=floor)
    def empty(world: World) -> Pair:
        return latency(world)

    @case(f"tls.{name}.take_32kb", unit="us", floor=floor)
    def take(world: World) -> Pair:
        return latency(world, PAYLOAD)

    @case(f"tls.{name}.pipelined", unit=RATE, floor=floor)
    def pipelined(world: World) -> Pair:
        return Pair(
            ours=_many(world, backend), floor=_many(world, "ray_tcp"), rounds=6, per_run=IN_FLIGHT
        )


def _many(world: World, backend: str) -> Callable[[], None]:
    scheduler = world.workers(backend)

    async def calls() -> None:
        await asyncio.gather(
            *(scheduler.async_call_engine("w/0", "ping", ENGINE) for _ in range(IN_FLIGHT))
        )

    return lambda: world.run(calls())


_compare("connection", "ray_tls")
_compare("unix", "ray")


@case("tls.certificate", unit="ms", floor="none: 20 ms")
def certificate(world: World) -> Pair:
    """Make a key, a certificate and a context, as each worker of another machine and each head
    does once.
    """
    return Pair(ours=server_tls, floor=20.0, rounds=10)
