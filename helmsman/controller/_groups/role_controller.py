"""Base controller of one role: all its workers and engines start together, or none does."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from helmsman._base.event_loop import forbid_blocking, run_blocking, run_sync
from helmsman._wire.group_keys import KEY_VARIABLE, group_key
from helmsman.api.closing import Starting
from helmsman.api.errors import HelmsmanError, InvalidSpecError, NotFoundError, SchedulerClosedError
from helmsman.api.fan_out import Fanout
from helmsman.api.scheduler import Call, EngineSpec, Job, Scheduler, Worker
from helmsman.controller._groups.call_all import call_all, gather_all
from helmsman.controller._scheduler.argument_names import require_engine_arguments
from helmsman.controller._scheduler.argument_types import refusal

logger = logging.getLogger(__name__)


class DeviceOwner(Protocol):
    """Decides which of two roles may use the devices that they share."""

    def require(self, role: str, method: str) -> None:
        """Raise DevicesNotOwnedError unless ``role`` may use the devices now."""

    async def explain(self, error: BaseException) -> None:
        """Raise DeviceMemoryError from an error that was caused by a lack of device memory."""

    def make_room(self) -> None:
        """Free the devices for a trainer that is about to be rebuilt."""


class StartedRole(Protocol):
    """Workers with engines that another controller has started, and will end: a Cluster."""

    @property
    def role(self) -> str: ...
    @property
    def workers(self) -> tuple[Worker, ...]: ...
    @property
    def dp_size(self) -> int: ...

    job: Job
    engine_name: str | None

    def restart(self, rank: int) -> None:
        """Replace the process of a rank, and build its engine again."""


class RoleController(Starting):
    """Starts the workers of a job with one engine in each, and deletes them on close.

    A controller starts once. Subclasses define the workers' environment and the engine methods that
    complete the start. TrainController documents the arguments and their errors.
    """

    _ready_methods: Sequence[str] = ("initialize",)
    _title: str = ""
    """Name of the public class, for messages; the name of this class when ''."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: str | type[Any],
        job: Job,
        engine_args: Sequence[Any] = (),
        engine_kwargs: Mapping[str, Any] | None = None,
        engine_name: str | None = None,
    ) -> None:
        title = self._title or type(self).__name__
        if not isinstance(job, Job):
            raise refusal(title, "job", job, "Job")
        job.validate()
        if not isinstance(engine, (str, type)):
            raise refusal(
                title,
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
        """Name of the role."""
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
        """Whether ``initialize`` has completed."""
        return bool(self._workers)

    def initialize(self) -> None:
        """Start the workers and create their engines. Idempotent.

        After an error, nothing of the role remains. Blocks in the caller's thread, so that an
        interrupt reaches the scheduler's start.

        Raises:
            JobError: The job is invalid, or its role exists already.
            StartError: The workers did not start.
            GroupCallError: Some engines failed; a role with one worker raises its CallError.
        """
        if self._closed:
            raise HelmsmanError(
                f"the controller of role {self.role!r} is closed; make a new one.", role=self.role
            )
        if self._workers:
            return
        self._create_workers()
        try:
            # Without a wait: create_workers returns when all are ready.
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
        """Destroy the engines and end the workers. Idempotent.

        Does nothing if the scheduler is already closed.

        Raises:
            ShutdownIncompleteError: A worker did not end within the deadline.
        """
        was_running = bool(self._workers) and not self._closed
        if was_running:
            forbid_blocking()  # raises before the controller is marked as closed
        self._closed = True
        if was_running:
            self._on_closing()
            self._delete_workers(None)

    def _environment(self, workers: Sequence[Worker]) -> Mapping[str, Mapping[str, str]]:
        """Return environment variables by worker id, which are set before engines are created."""
        return {}

    def _engine_of(self, rank: int, workers: Sequence[Worker]) -> str | type[Any] | EngineSpec:
        """Return the engine of a rank."""
        return self._engine

    def _after_death(self) -> str:
        """Return the next step after a worker's death, as a sentence; '' for the scheduler's."""
        return ""

    def _on_started(self) -> None:
        """Called once, when every worker is ready."""

    def _on_closing(self) -> None:
        """Called once, before the workers end."""

    def _create_workers(self) -> None:
        self.scheduler.create_workers(self.job)
        self.scheduler.advise(self.role, self._after_death())

    async def _make_ready(self, workers: Sequence[Worker], ranks: Sequence[int]) -> None:
        await self._build_engines(workers, ranks)
        calls = {workers[rank].id: Call() for rank in ranks}
        for method in self._ready_methods:
            # Timeouts.create_engine_s covers building the model, inside the constructor or after.
            await call_all(
                self.scheduler,
                self.role,
                method,
                calls,
                engine_name=self.engine_name,
                timeout=self.scheduler.timeouts.create_engine_s,
            )

    async def _build_engines(self, workers: Sequence[Worker], ranks: Sequence[int]) -> None:
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

    def _delete_workers(self, cause: BaseException | None) -> None:
        """Delete the role's workers; a failure is noted on ``cause``, or raised if that is None."""
        self.scheduler.advise(self.role, "")
        try:
            self.scheduler.delete_workers(self.role)
        except (NotFoundError, SchedulerClosedError):
            logger.debug("role %s was already deleted", self.role)
        except HelmsmanError as error:
            if cause is None:
                raise
            cause.add_note(f"Deleting the workers of role {self.role!r} failed, too: {error}")

    async def _call_workers(
        self,
        method: str,
        calls: Mapping[str, Call],
        timeout: float | None = None,
        follow: Callable[[Fanout], None] | None = None,
    ) -> list[Any]:
        name, scheduler = self.engine_name, self.scheduler
        return await call_all(
            scheduler, self.role, method, calls, engine_name=name, timeout=timeout, follow=follow
        )


def rank_environment(role: str, workers: Sequence[Worker]) -> dict[str, dict[str, str]]:
    """Return torch's rendezvous variables by worker id, and the key of the ranks' store.

    The master address is rank 0's node and its first leased port. Local ranks count the workers of
    one address.

    Raises:
        InvalidSpecError: Rank 0 has no leased port.
    """
    master = workers[0]
    if not master.engine_ports:
        raise InvalidSpecError(
            role=role,
            field="port_count",
            value=0,
            expected=f"at least 1 for {master.id}, to which the process group's ranks connect "
            "(with colocation, set it in the target's spec)",
        )
    per_node = Counter(worker.ip for worker in workers)
    place = f"{master.ip}:{master.engine_ports[0]}"
    secret = {KEY_VARIABLE: group_key(f"{role} at {place}", per_node)} if len(workers) > 1 else {}
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
            **secret,
        }
        seen[worker.ip] += 1
    return environment


S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """Return the blocking form ``x`` of a coroutine method ``async_x``.

    It has the same arguments and docstring. The method may await only run_async and other
    such methods. An interrupt of the waiting thread cancels the operation.
    """
    core: Any = method

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = run_blocking(core(self, *args, **kwargs))
        return result

    functools.update_wrapper(call, core)
    call.__name__ = core.__name__.removeprefix("async_")
    call.__qualname__ = f"{core.__qualname__.rpartition('.')[0]}.{call.__name__}"
    return call
