"""What cases share: schedulers with workers that live as long as the run, and bare Ray actors on
the same cluster.

Everything is made when it is first asked for, so that a case which needs no Ray starts none.
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
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.controller._schedulers.factory import make_scheduler
from helmsman.rpc_server._wire.segments import HAS_SEGMENTS
from helmsman.rpc_server._wire.tls import TLS_VARIABLE

NUM_WORKERS = 16
ENGINE = "engine"


class World:
    """A context manager; at its end all that it has made is ended."""

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
        """The time of one case; what is pushed on ``until_case_ends`` is undone at its end."""
        with contextlib.ExitStack() as stack:
            self._of_case = stack
            try:
                yield
            finally:
                self._of_case = None

    @property
    def until_case_ends(self) -> contextlib.ExitStack:
        """For what a case has to undo."""
        assert self._of_case is not None, "no case runs"
        return self._of_case

    def scheduler(self, backend: str) -> Scheduler:
        """A scheduler.

        Args:
            backend: 'local'; 'ray', the one embedded cluster; on the same cluster 'ray_tls' and
                'ray_tcp', whose workers are connected as those of other machines are, with TLS and
                without.
        """
        if backend in self._broken:
            raise RuntimeError(f"the scheduler {backend!r} could not be made, as was said above")
        if backend not in self._schedulers:
            # unless all goes well; many cases would each wait for it in vain
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
        """The scheduler, with an Engine in each of its workers 'w/0' to 'w/15'."""
        scheduler = self.scheduler(backend)
        if backend not in self._equipped:
            job = Job(role="w", replicas=NUM_WORKERS, tasks=[SchedulingSpec(cpu=0.1)])
            shares_memory = HAS_SEGMENTS and backend not in ("ray_tls", "ray_tcp")
            with mock.patch(
                "helmsman.controller._ray_backend.transport.HAS_SEGMENTS", shares_memory
            ):
                workers = scheduler.create_workers(job)
            self.run(_equip(scheduler, workers))
            self._equipped.add(backend)
        return scheduler

    @functools.cached_property
    def actors(self) -> list[Any]:
        """As many bare actors with Ray's default options, on the embedded cluster."""
        self.scheduler("ray")
        import ray

        actors = [ray.remote(Engine).remote() for _ in range(NUM_WORKERS)]
        ray.get([actor.ping.remote() for actor in actors])  # type: ignore[attr-defined]
        return actors

    @functools.cached_property
    def run(self) -> Callable[[Coroutine[Any, Any, Any]], Any]:
        """Runs a coroutine on the script's own event loop, as a script of coroutines has one."""
        return self._all.enter_context(asyncio.Runner()).run


async def _equip(scheduler: Scheduler, workers: list[str]) -> None:
    await asyncio.gather(*(scheduler.create_engine(worker, Engine, ENGINE) for worker in workers))
