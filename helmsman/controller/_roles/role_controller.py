"""The life of one role as both controllers have it: workers and engines start together or not at
all, and end together.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from helmsman.api.closing import Starting
from helmsman.api.errors import HelmsmanError, InvalidSpecError, NotFoundError, SchedulerClosedError
from helmsman.api.scheduler import Call, EngineSpec, Job, Scheduler, Worker
from helmsman.controller._aio.event_loop import forbid_blocking, run_blocking, run_sync
from helmsman.controller._roles.call_all import call_all, gather_all
from helmsman.controller._validation.argument_names import require_engine_arguments
from helmsman.controller._validation.argument_types import checked, refusal

logger = logging.getLogger(__name__)


class DeviceOwner(Protocol):
    """Whose devices these are now."""

    def require(self, role: str, method: str) -> None:
        """Raise DevicesNotOwnedError unless it is this role's turn."""

    async def explain(self, error: BaseException) -> None:
        """Raise DeviceMemoryError from an error that comes from devices without room."""

    def make_room(self) -> None:
        """Free the devices for a trainer that is rebuilt."""


class RoleController(Starting):
    """Creates the workers of ``job`` with one engine in each, and takes them down again.

    Subclasses say what the workers' environment is and which engine methods make an engine ready. A
    controller is started once.
    """

    _ready_methods: Sequence[str] = ("initialize",)
    _title: str = ""
    """Name of the class that a script sees; this one's when ''."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: str | type[Any],
        job: Job,
        engine_args: Sequence[Any] = (),
        engine_kwargs: Mapping[str, Any] | None = None,
        engine_name: str | None = None,
    ) -> None:
        """Describe the role; nothing starts yet.

        Args:
            engine: import path 'package.module.Class', or a class.
            job: role, replicas and what each worker needs.
            engine_args, engine_kwargs: for the engine's constructor, the same on every worker.
            engine_name: its name in each worker; the worker's id when None.
        Raises: JobError, also for an argument that the engine is known not to take; TypeError for
            an engine of another type.
        """
        job.validate()
        if not isinstance(engine, (str, type)):
            raise refusal(
                self._title or type(self).__name__,
                "engine",
                engine,
                "str | type[Any], a class or its import path",
            )
        require_engine_arguments(job.role, engine, engine_kwargs or {})
        self.scheduler = scheduler
        self.job = job
        self.engine_name = engine_name
        self._engine = engine
        self._engine_args = tuple(engine_args)
        self._engine_kwargs = dict(engine_kwargs or {})
        self._workers: tuple[Worker, ...] = ()
        self._closed = False

    @property
    def role(self) -> str:
        return self.job.role

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The role's workers in rank order; raises unless the controller is started."""
        self._check_started()
        return self._workers

    def _check_started(self) -> None:
        if self._closed:
            raise HelmsmanError(
                f"the controller of role {self.role!r} is closed; make a new one.", role=self.role
            )
        if not self._workers:
            raise HelmsmanError(
                f"the controller of role {self.role!r} is not started; use it in a "
                "`with` statement, or call initialize() first.",
                role=self.role,
            )

    @property
    def is_started(self) -> bool:
        return bool(self._workers)

    def initialize(self) -> None:
        """Start the workers and build their engines. Idempotent.

        On an error nothing of the role remains.

        It blocks, and runs in the caller's thread, so that an interrupt reaches the scheduler's own
        start.

        Raises: JobError, StartError, or the root cause of what failed on the workers, as call_all
            raises it.
        """
        if self._closed:
            raise HelmsmanError(
                f"the controller of role {self.role!r} is closed; make a new one.", role=self.role
            )
        if self._workers:
            return
        self.scheduler.create_workers(self.job)
        self.scheduler.advise(self.role, self._after_death())
        try:
            # they have just answered
            workers = tuple(self.scheduler.get_workers(self.role, timeout=0))
            run_sync(self._make_ready(workers, range(len(workers))))
            if self._closed:
                raise HelmsmanError(
                    f"the controller of role {self.role!r} was closed while it started.",
                    role=self.role,
                )
        except BaseException as error:
            self._delete_workers(error)
            raise
        self._workers = workers
        self._on_started()

    def close(self) -> None:
        """Destroy the engines and end the workers. Idempotent; nothing happens when the scheduler
        has been closed before. Raises: ShutdownIncompleteError.
        """
        was_running = bool(self._workers) and not self._closed
        if was_running:
            forbid_blocking()  # before it counts as closed
        self._closed = True
        if was_running:
            self._on_closing()
            self._delete_workers(None)

    def _environment(self, workers: Sequence[Worker]) -> Mapping[str, Mapping[str, str]]:
        """Environment variables by worker id, set before the engines are created."""
        return {}

    def _engine_of(self, rank: int, workers: Sequence[Worker]) -> str | type[Any] | EngineSpec:
        """What is built on a rank."""
        return self._engine

    def _after_death(self) -> str:
        """What to do when a worker has died, as a sentence; '' where it is for the scheduler to
        say.
        """
        return ""

    def _on_started(self) -> None:
        """Called once, when every worker is ready."""

    def _on_closing(self) -> None:
        """Called once, before the workers end."""

    async def _make_ready(self, workers: Sequence[Worker], ranks: Sequence[int]) -> None:
        scheduler, role, name = self.scheduler, self.role, self.engine_name
        chosen = {workers[rank].id: rank for rank in ranks}
        environment = {
            id_: variables for id_, variables in self._environment(workers).items() if id_ in chosen
        }
        await gather_all(
            role,
            "set_worker_env",
            {id_: scheduler.set_worker_env(id_, env) for id_, env in environment.items()},
        )
        await gather_all(
            role,
            "create_engine",
            {
                id_: scheduler.create_engine(
                    id_,
                    self._engine_of(rank, workers),
                    name,
                    *self._engine_args,
                    **self._engine_kwargs,
                )
                for id_, rank in chosen.items()
            },
        )
        calls = {id_: Call() for id_ in chosen}
        for method in self._ready_methods:
            # Building a model is what Timeouts.create_engine_s is for, also where the engine does
            # it after its constructor.
            await call_all(
                scheduler,
                role,
                method,
                calls,
                engine_name=name,
                timeout=scheduler.timeouts.create_engine_s,
            )

    def _delete_workers(self, cause: BaseException | None) -> None:
        """Take the role down; while ``cause`` is on its way, a failure to do so is added to it
        instead of replacing it.
        """
        self.scheduler.advise(self.role, "")
        try:
            self.scheduler.delete_workers(self.role)
        except (NotFoundError, SchedulerClosedError):
            logger.debug("role %s was gone already", self.role)
        except HelmsmanError as error:
            if cause is None:
                raise
            cause.add_note(f"and taking role {self.role!r} down failed: {error}")

    async def _call_workers(
        self, method: str, calls: Mapping[str, Call], timeout: float | None = None
    ) -> list[Any]:
        return await call_all(
            self.scheduler, self.role, method, calls, engine_name=self.engine_name, timeout=timeout
        )


def rank_environment(role: str, workers: Sequence[Worker]) -> dict[str, dict[str, str]]:
    """The rendezvous variables of torch for each worker, by worker id.

    The master is rank 0's own node and the first port leased to it; local ranks count the workers
    of one address.

    Raises: InvalidSpecError when rank 0 has no leased port.
    """
    master = workers[0]
    if not master.engine_ports:
        raise InvalidSpecError(
            role=role,
            field="port_count",
            value=0,
            expected=f"at least 1 for {master.id}, where the process group meets (with "
            "colocation, in the target's spec)",
        )
    per_node = Counter(worker.ip for worker in workers)
    seen: Counter[str] = Counter()
    environment = {}
    for rank, worker in enumerate(workers):
        environment[worker.id] = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(workers)),
            "LOCAL_RANK": str(seen[worker.ip]),
            "LOCAL_WORLD_SIZE": str(per_node[worker.ip]),
            "MASTER_ADDR": master.ip,
            "MASTER_PORT": master.engine_ports[0],
        }
        seen[worker.ip] += 1
    return environment


S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """Make the blocking form ``x`` of a coroutine method ``async_x``.

    It has the same arguments, checks and documentation. The method may await only run_async and
    other such methods. An interrupt of the waiting thread cancels the operation.
    """
    core: Any = inspect.unwrap(method)

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = run_blocking(core(self, *args, **kwargs))
        return result

    functools.update_wrapper(call, core)
    call.__name__ = core.__name__.removeprefix("async_")
    call.__qualname__ = f"{core.__qualname__.rpartition('.')[0]}.{call.__name__}"
    return checked(call)
