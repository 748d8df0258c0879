"""Resources shared by cases: schedulers with workers for the whole run, and bare Ray actors on the
same cluster.

Each is made on first use, so that a case without Ray starts none.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

from benchmarks.engines import Engine
from helmsman._wire.segments import HAS_SEGMENTS
from helmsman._wire.tls import TLS_VARIABLE
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.controller._scheduler.factory import make_scheduler

NUM_WORKERS = 16
ENGINE = "engine"


class World:
    """A context manager that ends all its schedulers and actors on exit."""

    def __init__(self) -> None:
        self._all = contextlib.ExitStack()
        self._of_case: contextlib.ExitStack | None = None
        self._schedulers: dict[str, Scheduler] = {}
        self._equipped: set[str] = set()
        self._broken: set[str] = set()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._all.close()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Enter the time of one case; its end calls the callbacks on ``until_case_ends``."""
        with contextlib.ExitStack() as stack:
            self._of_case = stack
            try:
                yield
            finally:
                self._of_case = None

    @property
    def until_case_ends(self) -> contextlib.ExitStack:
        """Callbacks of the current case."""
        assert self._of_case is not None, "no case runs"
        return self._of_case

    def scheduler(self, backend: str) -> Scheduler:
        """Return a scheduler.

        Args:
            backend: 'local'; 'ray', the one embedded cluster; on the same cluster 'ray_tls' and
                'ray_tcp', whose workers are connected as those of other machines are, with TLS and
                without.
        """
        if backend in self._broken:
            raise RuntimeError(f"the scheduler {backend!r} could not be made, as was said above")
        if backend not in self._schedulers:
            # Removed after a successful start: later cases do not repeat a start that failed.
            self._broken.add(backend)
            if backend in ("ray_tls", "ray_tcp"):
                self.scheduler("ray")
                with mock.patch.dict(
                    os.environ, {TLS_VARIABLE: "1" if backend == "ray_tls" else "0"}
                ):
                    made = make_scheduler("ray")
            elif backend == "ray":
                made = make_scheduler("ray", address="local", num_cpus=64)
            else:
                made = make_scheduler(backend)
            self._schedulers[backend] = self._all.enter_context(made)
            self._broken.discard(backend)
        return self._schedulers[backend]

    def workers(self, backend: str) -> Scheduler:
        """Return the scheduler, with an Engine in each of its workers 'w/0' to 'w/15'."""
        scheduler = self.scheduler(backend)
        if backend not in self._equipped:
            job = Job(role="w", replicas=NUM_WORKERS, tasks=[SchedulingSpec(cpu=0.1)])
            shares_memory = HAS_SEGMENTS and backend not in ("ray_tls", "ray_tcp")
            with mock.patch(
                "helmsman.controller._scheduler.ray.transport.HAS_SEGMENTS", shares_memory
            ):
                workers = scheduler.create_workers(job)
            self.run(_equip(scheduler, workers))
            self._equipped.add(backend)
        return scheduler

    @functools.cached_property
    def actors(self) -> list[Any]:
        """Return as many bare actors with Ray's default options, on the embedded cluster."""
        self.scheduler("ray")
        import ray

        actors = [ray.remote(Engine).remote() for _ in range(NUM_WORKERS)]
        ray.get([actor.ping.remote() for actor in actors])  # type: ignore[attr-defined]
        return actors

    @functools.cached_property
    def run(self) -> Callable[[Coroutine[Any, Any, Any]], Any]:
        """Return a function that runs a coroutine on an event loop of the script."""
        return self._all.enter_context(asyncio.Runner()).run


async def _equip(scheduler: Scheduler, workers: list[str]) -> None:
    await asyncio.gather(*(scheduler.create_engine(worker, Engine, ENGINE) for worker in workers))
