"""Duration of starts and ends of workers."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.engines import Engine, TorchReady
from benchmarks.harness import Pair, case
from benchmarks.starts import NUM_INSTANCES, NUM_TORCH, SMALL, end_bare, start_bare, start_ours
from benchmarks.world import World
from helmsman.controller._scheduler.factory import make_scheduler

ROOT = Path(__file__).parent.parent.parent


@functools.cache
def _started(kind: str, turn: int) -> dict[str, float]:
    """Return the figures of one process of benchmarks.starts; cases of the same turn share them."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for name in (
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
    ):
        # variables of a cluster that this process may have embedded
        environment.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "seconds.json"
        command = [sys.executable, "-m", "benchmarks.starts", kind, str(told)]
        subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=300
        )
        figures: dict[str, float] = json.loads(told.read_text())
    return figures


def _told(kind: str, figure: str) -> Callable[[], float]:
    """Return a function that takes a figure of a kind's processes, one process per turn; processes
    with a foreign cluster alternate the order of the sides.
    """
    turns = itertools.count()

    def take() -> float:
        turn = next(turns)
        return _started(f"{kind}_ours_first" if kind == "foreign" and turn % 2 else kind, turn)[
            figure
        ]

    return take


def _processes_s(code: str, number: int) -> float:
    """Return the seconds that this many bare interpreters, started together, take."""
    start = time.perf_counter()
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]
    for each in started:
        each.wait()
    return time.perf_counter() - start


def _local(number: int, needs_torch: bool) -> None:
    name, code = (
        (f"start.local.{number}_torch", "import torch")
        if needs_torch
        else (f"start.local.{number}", "pass")
    )
    goal = "<= 1/4" if needs_torch and number == NUM_TORCH else ""

    @case(name, unit="s", goal=goal, floor=f"{number} times python -c '{code}', together")
    def local(world: World) -> Pair:
        def ours() -> float:
            start = time.perf_counter()
            with make_scheduler("local", preload=("torch",) if needs_torch else ()) as scheduler:
                start_ours(scheduler, "w", number, TorchReady if needs_torch else Engine)
                return time.perf_counter() - start

        return Pair(
            ours=ours,
            floor=lambda: _processes_s(code, number),
            rounds=2 if needs_torch else 4,
            returns_figure=True,
            warm_up=0,
        )


def _ray(number: int) -> None:
    @case(
        f"start.ray.{number}",
        unit="s",
        floor="bare actors on an embedded Ray with its defaults; both clusters are up",
    )
    def on_ray(world: World) -> Pair:
        ours, floor = _told("small", str(number)), _told("bare_small", str(number))
        return Pair(ours=ours, floor=floor, rounds=2, returns_figure=True, warm_up=0)


for _number in (1, 4, 16):
    _local(_number, needs_torch=False)
for _number in (1, 4, 16):
    _local(_number, needs_torch=True)
for _number in SMALL:
    _ray(_number)


@case(
    f"start.ray.{NUM_TORCH}_torch",
    unit="s",
    goal="<= 0.3",
    floor="bare actors that import torch, Ray's defaults; clusters are up",
)
def ray_torch(world: World) -> Pair:
    """Start workers on an embedded cluster."""
    return Pair(
        ours=_told("embedded", "ready"),
        floor=_told("foreign", "bare"),
        rounds=2,
        returns_figure=True,
        warm_up=0,
    )


@case(
    f"start.ray.{NUM_TORCH}_torch_from_nothing",
    unit="s",
    floor="the same with the start of the clusters",
)
def ray_torch_from_nothing(world: World) -> Pair:
    """Start an embedded cluster and workers on it."""
    return Pair(
        ours=_told("embedded", "whole"),
        floor=_told("foreign", "whole"),
        rounds=2,
        returns_figure=True,
        warm_up=0,
    )


@case(
    f"start.ray.{NUM_TORCH}_torch_joined",
    unit="s",
    goal="<= 1.1",
    floor="bare actors that import torch, same cluster",
)
def ray_torch_joined(world: World) -> Pair:
    """Start workers on a cluster that was started with Ray's defaults."""
    return Pair(
        ours=_told("foreign", "ours"),
        floor=_told("foreign", "bare"),
        rounds=2,
        returns_figure=True,
        warm_up=0,
    )


@case(
    f"start.ray.{NUM_INSTANCES}_instances",
    unit="s",
    goal="<= 1.1",
    floor="bare actors, with a placement group each too",
)
def ray_instances(world: World) -> Pair:
    """Start many groups at once."""
    return Pair(
        ours=_told("instances", "ready"),
        floor=_told("bare_instances", "ready"),
        rounds=1,
        returns_figure=True,
        warm_up=0,
    )


@case("teardown.local.16", unit="s", floor="16 bare interpreters, killed and awaited")
def local_teardown(world: World) -> Pair:
    """Measure from delete_workers until every process has exited."""
    scheduler = world.scheduler("local")

    def ours() -> float:
        start_ours(scheduler, "ended", 16, Engine)
        start = time.perf_counter()
        scheduler.delete_workers("ended")
        return time.perf_counter() - start

    def bare() -> float:
        command = [sys.executable, "-c", "print(flush=True); input()"]
        started = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(16)
        ]
        for each in started:
            assert each.stdout is not None
            each.stdout.readline()  # the process is ready
        return _end_s(started)

    return Pair(ours=ours, floor=bare, rounds=4, returns_figure=True, warm_up=0)


def _end_s(processes: Sequence[subprocess.Popen[bytes]]) -> float:
    start = time.perf_counter()
    for each in processes:
        each.kill()
    for each in processes:
        each.communicate()
    return time.perf_counter() - start


@case(
    "teardown.ray.16", unit="s", floor="ray.kill of 16 bare actors, until each is known to be dead"
)
def ray_teardown(world: World) -> Pair:
    """Measure the same on the embedded cluster."""
    scheduler = world.scheduler("ray")

    def ours() -> float:
        start_ours(scheduler, "ended", 16, Engine)
        start = time.perf_counter()
        scheduler.delete_workers("ended")
        return time.perf_counter() - start

    return Pair(
        ours=ours,
        floor=lambda: end_bare(start_bare(16, Engine)[1]),
        rounds=2,
        returns_figure=True,
        warm_up=0,
    )
