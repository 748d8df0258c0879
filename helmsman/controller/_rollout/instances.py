"""Instances: the workers of a rollout role, their states, and calls to their engines."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from helmsman._base.event_loop import run_sync
from helmsman.api.errors import (
    EngineCallError,
    EngineDeadError,
    EngineExistsError,
    EngineNotFoundError,
    HelmsmanError,
    InstanceLostError,
    InvalidSpecError,
    WorkerFailedError,
    WorkerNotFoundError,
)
from helmsman.api.forms import run_in_new_thread
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.scheduler import Job, Scheduler, Worker
from helmsman.api.supervision import Sign
from helmsman.controller._groups.call_all import DEFAULT_GRACE_S, gather_all, group_error
from helmsman.controller._groups.role_controller import DeviceOwner, RoleController, StartedRole
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.health import Health, HealthEvent, SupervisionPolicy
from helmsman.controller._rollout.request import Instance, InstanceStats, RolloutStats
from helmsman.controller._rollout.retries import RetryPolicy, RetryUnbegun
from helmsman.controller._rollout.supervisor import Supervisor

_GONE = (WorkerFailedError, EngineNotFoundError)
"""Errors of an engine whose process has ended; another role may have restarted the worker since."""
_LOOK_EVERY_S = 0.25
"""Time between attempts to build an engine in a worker that another role restarts."""


class Nap:
    """The sleep of one instance while others serve.

    Args:
        drain: Marker of the drain that keeps requests away.
    """

    def __init__(self, drain: object) -> None:
        self.drain, self.woken = drain, asyncio.Event()


class Instances(RoleController):
    """Starts and ends the workers of a role, with their request queue and their supervision.

    It is the backend of the request queue, and the other parts of RolloutController use it.

    Args:
        scheduler: Scheduler of the workers.
        engine: The engine, as an import path or a class.
        job: Role, replicas and resources of each worker, or a started role whose workers are the
            instances.
        engine_args: Positional arguments of the engine's constructor.
        engine_kwargs: Keyword arguments of the engine's constructor.
        engine_name: Name of the engine in each worker; the worker's id when None.
        capacity: Maximum requests in flight per worker.
        request_timeout: Seconds from sending a request to its result; ``timeouts.call_s`` of the
            scheduler when None.
        retries: Decides which requests of a dead worker continue on another.
        supervision: Health probes and rebuilds; none when None.
        make_queue: Creates the GenerateScheduler.
        why_hopeless: Returns the error of queued requests that no instance will serve, or None.
        device_owner: Returns the DeviceHandoff of a role that shares devices with a trainer, or
            None.
        rebuild: Rebuilds a worker; returns whether it has the current weights.
        on_closed: Called after the last request has ended, before the workers end.
    """

    _title = "RolloutController"

    def __init__(
        self,
        scheduler: Scheduler,
        engine: str | type[Any],
        job: Job | StartedRole,
        engine_args: Sequence[Any],
        engine_kwargs: Mapping[str, Any] | None,
        engine_name: str | None,
        capacity: int,
        request_timeout: float | None,
        retries: RetryPolicy | None,
        supervision: SupervisionPolicy | None,
        *,
        make_queue: Callable[..., GenerateScheduler],
        why_hopeless: Callable[[], Exception | None],
        device_owner: Callable[[], DeviceOwner | None],
        rebuild: Callable[[str], Awaitable[bool]],
        on_closed: Callable[[], None],
    ) -> None:
        self._lender: StartedRole | None = None
        own: Any = job  # RoleController refuses other types
        if isinstance(own, RoleController):
            lender: Any = own
            _check_lender(lender, bool(engine_args or engine_kwargs or engine_name))
            self._lender, own, engine_name = lender, lender.job, lender.engine_name
        super().__init__(scheduler, engine, own, engine_args, engine_kwargs, engine_name)
        if capacity < 1:
            raise ValueError(f"max_in_flight_per_worker is {capacity}; expected 1 or more")
        self.capacity = capacity
        self.device_owner = device_owner
        self._on_closed = on_closed
        self._request_timeout = request_timeout
        self.is_supervised = supervision is not None
        supervision = supervision or SupervisionPolicy()
        self._goes_on_elsewhere = retries is not None and not isinstance(retries, RetryUnbegun)
        self._requests = make_queue(
            self, why_hopeless=why_hopeless, record=scheduler.reporter.record
        )
        self.supervisor = Supervisor(
            self._requests, supervision, scheduler.monitor, rebuild, engine_name
        )
        self.num_builds: Counter[str] = Counter()
        """Number of rebuilds per worker; a result of an earlier process is ignored."""
        self._looking = asyncio.Lock()
        self.asleep: dict[str, Nap] = {}
        """Instances that sleep while others serve, by worker id."""

    def _create_workers(self) -> None:
        if self._lender is None:
            super()._create_workers()

    async def _build_engines(self, workers: Sequence[Worker], ranks: Sequence[int]) -> None:
        if self._lender is None:
            await super()._build_engines(workers, ranks)

    def _delete_workers(self, cause: BaseException | None) -> None:
        if self._lender is None:
            super()._delete_workers(cause)

    async def restart(self, worker_id: str) -> None:
        """Replace the process of a worker, and make its engine ready.

        A role that reuses the workers of another one waits until that has restarted them.
        """
        strategy, limits = self.job.scheduling_strategy, self.scheduler.timeouts
        reuses = self._lender is None and strategy.type == "colocation" and not strategy.fork
        if self._lender is not None:
            ids = [worker.id for worker in self._lender.workers]
            await run_in_new_thread(self._lender.restart, ids.index(worker_id))
        elif not reuses:
            await run_in_new_thread(self.scheduler.restart_worker, worker_id)
        begun = time.monotonic()
        while True:
            await self.look()
            try:
                await self.build([worker_id])
                return
            # An engine that exists is the lost one, which the owner has not ended yet, or answers.
            except (*_GONE, EngineExistsError, EngineCallError) as error:
                if reuses and isinstance(error, EngineExistsError) and await self._works(worker_id):
                    return
                is_new = isinstance(error, EngineCallError)
                limit_s = limits.start_s + is_new * limits.create_engine_s
                may_come = reuses and (is_death(error) or not is_new)
                if not may_come or time.monotonic() > begun + limit_s:
                    raise
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _works(self, worker_id: str) -> bool:
        limit_s = self.scheduler.timeouts.health_s
        health = (await self.scheduler.monitor.ask(worker_id, limit_s, or_busy=False)).health
        return health is not None and not (health.failure or health.failed_engines)

    def check_resizable(self, field: str, value: Any) -> None:
        """Raise InvalidSpecError if the number of workers is fixed."""
        if self._lender is not None:
            raise InvalidSpecError(
                role=self.role,
                field=field,
                value=value,
                expected=f"no change, since the configuration of Cluster {self.role!r} fixes the "
                "number of its workers; drain or sleep(worker_ids=...) takes some out of service",
            )

    async def look(self) -> None:
        """Update the list of workers. Updates are serialized, so that the latest one prevails."""
        async with self._looking:
            self._workers = tuple(await run_in_new_thread(self.scheduler.get_workers, self.role, 0))

    async def build(self, worker_ids: Sequence[str]) -> None:
        """Build the engines of new workers, and make them ready."""
        chosen = [worker for worker in self._workers if worker.id in worker_ids]
        await self._make_ready(chosen, range(len(chosen)))

    def _after_death(self) -> str:
        supervised = "Its RolloutController starts it again"
        if not self.is_supervised:
            supervised = (
                "With supervision=SupervisionPolicy() its RolloutController starts dead "
                "instances again"
            )
        retried = "with retries=RetryGeneration() requests that it had begun continue elsewhere"
        if self._goes_on_elsewhere:
            retried = "its retries decide which requests continue elsewhere"
        return f"{supervised}, and {retried}."

    def _on_started(self) -> None:
        async def start() -> None:
            for worker in self.workers:
                self.supervisor.watch(worker.id)
                self._requests.add(worker.id, self.capacity)
            if self.is_supervised:
                self.supervisor.start()

        run_sync(start())

    def _on_closing(self) -> None:
        async def close() -> None:
            self.supervisor.stop()
            self._requests.close(f"the controller of role {self.role!r} was closed")

        run_sync(close())
        self._on_closed()

    @property
    def requests(self) -> GenerateScheduler:
        """The request queue of the role.

        Raises:
            HelmsmanError: The controller is not started.
        """
        self._check_started()
        return self._requests

    async def stats(self) -> RolloutStats:
        requests = self.requests
        return RolloutStats(
            num_queued=requests.num_queued,
            paused=requests.is_suspended,
            instances={
                id_: InstanceStats(
                    state=each.health,
                    num_in_flight=each.num_in_flight,
                    outstanding_tokens=each.outstanding_tokens,
                    is_draining=each.is_draining,
                    is_asleep=id_ in self.asleep,
                )
                for id_, each in requests.instances.items()
            },
        )

    def known(self, worker_ids: Collection[str]) -> list[str]:
        """Return the ids without duplicates.

        Raises:
            WorkerNotFoundError: There is no such instance.
        """
        for worker_id in worker_ids:
            if worker_id not in self.requests.instances:
                raise WorkerNotFoundError(name=worker_id, known=list(self.requests.instances))
        return list(dict.fromkeys(worker_ids))

    def some_live(self) -> bool:
        """Return whether any instance is not known to be dead."""
        return any(each.health.is_alive for each in self._requests.instances.values())

    def living_ids(self, *, with_suspects: bool = True) -> list[str]:
        """Return the ids of live instances that do not sleep; none while all are being rebuilt.

        Args:
            with_suspects: Whether to include instances whose reply to a probe is late.

        Raises:
            Exception: No instance is alive or will be; states the reason.
        """
        living = [each for each in self.requests.instances.values() if each.health.is_alive]
        if not living and (reason := self.why_none_will_serve("any call")) is not None:
            raise reason
        return [
            each.instance_id
            for each in living
            if each.instance_id not in self.asleep
            and (with_suspects or each.health is not Health.SUSPECT)
        ]

    def serving_ids(self) -> list[str]:
        return [id_ for id_, instance in self.requests.instances.items() if instance.is_serving]

    async def answering_ids(self) -> list[str]:
        ask, limit_s = self.scheduler.monitor.ask, self.scheduler.timeouts.health_s
        reports = await asyncio.gather(
            *(ask(worker_id, limit_s, or_busy=False) for worker_id in self.living_ids())
        )
        return [report.worker_id for report in reports if report.sign is Sign.ANSWERED]

    def why_none_will_serve(self, method: str = "generate") -> Exception | None:
        """Return the error of ``method`` if no instance serves or is being rebuilt, else None."""
        instances = self._requests.instances
        if any(
            each.health.is_serving or self.supervisor.is_coming_back(id_)
            for id_, each in instances.items()
        ):
            return None
        errors = {id_: each.error or _lacks_weights(each) for id_, each in instances.items()}
        return group_error(self.role, method, errors, len(instances))

    async def ask(
        self, worker_id: str, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call an engine. All calls use this method, so that any of them detects a death."""
        build = self.num_builds[worker_id]
        try:
            return await self.scheduler.async_call_engine(
                worker_id, method, self.engine_name, *args, rpc_timeout=timeout, **kwargs
            )
        except (*_GONE, EngineCallError) as error:
            # error.worker_id is not compared: with colocation, the process that died may have an id
            # of another role.
            if is_death(error) and self.num_builds[worker_id] == build:
                self.supervisor.note(worker_id, HealthEvent.LOST, error)
            raise

    async def ask_while_it_lives(
        self, worker_id: str, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call an engine; raises also if supervision declares its instance dead meanwhile.

        An instance that hangs may never reply.
        """
        call = asyncio.ensure_future(self.ask(worker_id, method, *args, timeout=timeout, **kwargs))
        dead = asyncio.ensure_future(self.supervisor.until_dead(worker_id))
        try:
            await asyncio.wait([call, dead], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():  # If the process has exited, the call soon fails with the cause.
                await asyncio.wait([call], timeout=DEFAULT_GRACE_S)
            if not call.done():
                instance = self.requests.instances.get(worker_id)
                raise (instance and instance.error) or HelmsmanError(
                    f"{worker_id} was declared dead by supervision.", worker_id=worker_id
                )
            return call.result()
        finally:
            dead.cancel()
            call.cancel()

    async def ask_all(self, method: str) -> dict[str, Any]:
        """Call the engines of all live instances, and await every call."""
        living = self.living_ids()
        calls = {worker_id: self.ask(worker_id, method) for worker_id in living}
        return dict(
            zip(living, await gather_all(self.role, method, calls, grace_s=None), strict=True)
        )

    async def explain(self, error: Exception) -> None:
        """Raise DeviceMemoryError from an out-of-memory error of devices shared with a trainer."""
        if (device_owner := self.device_owner()) is not None:
            await device_owner.explain(error)

    async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
        result: GenerationResult = await self._serve(
            instance_id, "agenerate", request, self._request_timeout
        )
        return result

    async def generate_samples(
        self, instance_id: str, requests: Sequence[GenerationRequest]
    ) -> Sequence[GenerationResult]:
        results: Sequence[GenerationResult] = await self._serve(
            instance_id, "agenerate_samples", list(requests), self._request_timeout
        )
        return results

    async def abort(self, instance_id: str, request_ids: Sequence[str]) -> None:
        await self._serve(instance_id, "abort", list(request_ids))

    async def _serve(
        self, instance_id: str, method: str, argument: Any, timeout: float | None = None
    ) -> Any:
        """Call an engine for the request queue; raises InstanceLostError for a death."""
        try:
            return await self.ask(instance_id, method, argument, timeout=timeout)
        except _GONE as error:
            raise _lost(instance_id, str(error)) from error
        except EngineCallError as error:
            if isinstance(error.__cause__, EngineDeadError):
                raise _lost(instance_id, error.__cause__.reason) from error
            await self.explain(error)
            raise


def _check_lender(lender: StartedRole, has_engine_arguments: bool) -> None:
    num_workers = len(lender.workers)
    if lender.dp_size != num_workers:
        raise InvalidSpecError(
            role=lender.role,
            field="dp_size",
            value=lender.dp_size,
            expected=f"{num_workers}, since each worker of the Cluster is an instance; for an "
            "engine on several devices, set num_gpus_per_worker and the engine's own tp_size",
        )
    if has_engine_arguments:
        raise ValueError(
            f"engine_args, engine_kwargs and engine_name are those of Cluster {lender.role!r}; "
            "pass them to the Cluster"
        )


def is_death(error: Exception) -> bool:
    """Return whether an error means that the worker, or a process of its engine, has died."""
    return isinstance(error, _GONE) or isinstance(error.__cause__, EngineDeadError)


def _lost(instance_id: str, reason: str) -> InstanceLostError:
    return InstanceLostError(instance_id=instance_id, reason=reason, may_have_begun=True)


def _lacks_weights(instance: Instance) -> HelmsmanError:
    """Return the error of an instance that does not serve, although no call to it has failed."""
    return HelmsmanError(
        f"{instance.instance_id} is {instance.health.value}: it does not have the weights of the "
        "last update. It serves again after "
        "the next one.",
        worker_id=instance.instance_id,
    )
