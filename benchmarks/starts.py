"""One start in a process of its own, with its own Ray: python -m benchmarks.starts KIND PATH

embedded: torch-ready workers on a cluster that Helmsman starts. foreign: bare actors that import
torch and torch-ready workers, both on one cluster that was started with Ray's defaults;
foreign_ours_first: the same in the other order. instances: 64 instances with a placement group
each; bare_instances: bare actors with one each. small: a few workers without torch on a cluster
that Helmsman starts; bare_small: bare actors on one with Ray's defaults. Writes seconds by name as
JSON to PATH.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engines import Engine, TorchReady
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.controller._scheduler.factory import make_scheduler

NUM_TORCH = 16
NUM_INSTANCES = 64
SMALL = (1, 4, 16)


def start_ours(
    scheduler: Scheduler, role: str, num_workers: int, engine: type[Any], **spec: Any
) -> float:
    """Return the seconds until this many workers have an engine."""
    start = time.perf_counter()
    workers = scheduler.create_workers(
        Job(role=role, replicas=num_workers, tasks=[SchedulingSpec(cpu=0.1, **spec)])
    )

    async def equip() -> None:
        await asyncio.gather(
            *(scheduler.create_engine(worker, engine, "engine") for worker in workers)
        )

    asyncio.run(equip())
    return time.perf_counter() - start


def start_bare(
    num_workers: int, engine: type[Any], groups: bool = False
) -> tuple[float, list[Any]]:
    """Return the seconds until this many bare actors have answered, and the actors."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    start = time.perf_counter()
    options: list[dict[str, Any]] = [{} for _ in range(num_workers)]
    if groups:
        made = [placement_group([{"CPU": 0.1}]) for _ in range(num_workers)]
        ray.get([group.ready() for group in made])
        options = [
            {"num_cpus": 0.1, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0)}
            for group in made
        ]
    actors = [ray.remote(engine).options(**each).remote() for each in options]
    ray.get([actor.ping.remote() for actor in actors])
    return time.perf_counter() - start, actors


def end_bare(actors: list[Any]) -> float:
    """Return the seconds until Ray reports bare actors as dead."""
    import ray

    start = time.perf_counter()
    for actor in actors:
        ray.kill(actor)
    for actor in actors:
        try:
            ray.get(actor.ping.remote())
        except ray.exceptions.RayActorError:
            continue
    return time.perf_counter() - start


def embedded() -> dict[str, float]:
    """Measure 'whole' with the start of the cluster, and 'ready' without it."""
    start = time.perf_counter()
    with make_scheduler("ray", address="local", num_cpus=_NUM_CPUS) as scheduler:
        ready = start_ours(scheduler, "w", NUM_TORCH, TorchReady)
        return {"ready": ready, "whole": time.perf_counter() - start}


def foreign(ours_first: bool = False) -> dict[str, float]:
    """Measure 'bare' and 'ours' on a running cluster; 'whole' is bare with the cluster's start."""
    start = time.perf_counter()
    _init()
    up = time.perf_counter() - start
    taken: dict[str, float] = {}

    def bare() -> None:
        taken["bare"], actors = start_bare(NUM_TORCH, TorchReady)
        end_bare(actors)

    def ours() -> None:
        with make_scheduler("ray") as scheduler:
            taken["ours"] = start_ours(scheduler, "w", NUM_TORCH, TorchReady)

    for each in (ours, bare) if ours_first else (bare, ours):
        each()
    return {**taken, "whole": up + taken["bare"]}


def instances() -> dict[str, float]:
    """Measure 64 instances, each with a placement group and a worker."""
    with make_scheduler("ray", address="local", num_cpus=_NUM_CPUS) as scheduler:
        return {
            "ready": start_ours(
                scheduler, "w", NUM_INSTANCES, Engine, ray_placement_strategy="separate"
            )
        }


def bare_instances() -> dict[str, float]:
    """Measure the same with Ray alone."""
    _init()
    return {"ready": start_bare(NUM_INSTANCES, Engine, groups=True)[0]}


def small() -> dict[str, float]:
    """Measure a role for each number of workers, one after another."""
    taken = {}
    with make_scheduler("ray", address="local", num_cpus=_NUM_CPUS) as scheduler:
        for number in SMALL:
            taken[str(number)] = start_ours(scheduler, "w", number, Engine)
            scheduler.delete_workers("w")
    return taken


def bare_small() -> dict[str, float]:
    """Measure the same with Ray alone."""
    _init()
    taken = {}
    for number in SMALL:
        taken[str(number)], actors = start_bare(number, Engine)
        end_bare(actors)
    return taken


def _init() -> None:
    """Start a cluster with Ray's defaults and as many logical CPUs as ours, so that no worker waits
    for them.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",  # type: ignore[arg-type]
        num_cpus=_NUM_CPUS,
    )


_NUM_CPUS = max(8, os.cpu_count() or 1)  # 64 workers with a tenth each
_KINDS: dict[str, Callable[[], dict[str, float]]] = {
    "embedded": embedded,
    "foreign": foreign,
    "foreign_ours_first": lambda: foreign(ours_first=True),
    "instances": instances,
    "bare_instances": bare_instances,
    "small": small,
    "bare_small": bare_small,
}


if __name__ == "__main__":
    # Workers find classes by the name of their module, which is __main__ where this is the script.
    from benchmarks import starts

    # The result goes to a file, since Ray prints to standard output.
    Path(sys.argv[2]).write_text(json.dumps(starts._KINDS[sys.argv[1]]()))
