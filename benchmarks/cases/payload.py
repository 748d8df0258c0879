"""One call with a tensor or an array as its argument or result, compared with a bare Ray call and
with a copy.

An argument has arrived when the method has it in writable memory of its own; Ray's own numpy
arguments are read-only views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.engines import value_of
from benchmarks.harness import Pair, case
from benchmarks.world import ENGINE, World

SIZES = {"1KB": 1 << 10, "1MB": 1 << 20, "64MB": 64 << 20}
LARGE = {"512MB": 512 << 20}
ROUNDS = {"1KB": (10, 40), "1MB": (10, 10), "64MB": (7, 1), "512MB": (3, 1)}


def _declare(
    group: str, backend: str, kind: str, size: str, num_bytes: int, direction: str
) -> None:
    name = f"{group}.{backend}.{kind}.{size}.{direction}"
    is_default = group == "payload"
    rounds, repeats = ROUNDS[size]
    fast = kind == "torch" and size in ("64MB", "512MB")

    @case(
        name,
        unit="ms",
        goal="<= 1/15" if fast and backend == "ray" else "",
        floor="a bare Ray call",
        is_default=is_default,
    )
    def beside_ray(world: World) -> Pair:
        ours = _ours(world, backend, kind, num_bytes, direction)
        return Pair(
            ours=ours,
            floor=_bare(world, kind, num_bytes, direction),
            rounds=rounds,
            repeats=repeats,
            warm_up=2,
        )

    if num_bytes < SIZES["64MB"]:
        return

    @case(
        f"{name}.copy",
        unit="ms",
        goal="<= 2" if fast and backend == "local" else "",
        floor="memcpy",
        is_default=is_default,
    )
    def beside_a_copy(world: World) -> Pair:
        value = value_of("numpy", num_bytes)
        target = value.copy()

        def copy() -> None:
            target[:] = value

        return Pair(
            ours=_ours(world, backend, kind, num_bytes, direction),
            floor=copy,
            rounds=rounds,
            repeats=3,
            warm_up=2,
        )


def _ours(
    world: World, backend: str, kind: str, num_bytes: int, direction: str
) -> Callable[[], Any]:
    scheduler = world.workers(backend)
    if direction == "argument":
        value = value_of(kind, num_bytes)
        return lambda: scheduler.call_engine("w/0", "take", ENGINE, value)
    scheduler.call_engine("w/0", "make", ENGINE, kind, num_bytes)
    world.until_case_ends.callback(scheduler.call_engine, "w/0", "make", ENGINE, "numpy", 0)
    return lambda: scheduler.call_engine("w/0", "give", ENGINE)


def _bare(world: World, kind: str, num_bytes: int, direction: str) -> Callable[[], Any]:
    actor = world.actors[0]
    import ray

    if direction == "argument":
        value = value_of(kind, num_bytes)
        return lambda: ray.get(actor.take.remote(value))
    ray.get(actor.make.remote(kind, num_bytes))
    world.until_case_ends.callback(lambda: ray.get(actor.make.remote("numpy", 0)))
    return lambda: ray.get(actor.give.remote())


for _backend in ("ray", "local"):
    for _kind in ("torch", "numpy"):
        for _direction in ("argument", "result"):
            for _size, _num_bytes in SIZES.items():
                _declare("payload", _backend, _kind, _size, _num_bytes, _direction)
            for _size, _num_bytes in LARGE.items():
                _declare("payload_large", _backend, _kind, _size, _num_bytes, _direction)
