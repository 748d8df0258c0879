"""The contract between a controller script and the backend that runs its workers.

A script describes a Job, a Scheduler starts its workers, and the script creates and calls engines
in them by worker id. Names follow AReaL's Scheduler API, so that scripts carry over.
"""

from __future__ import annotations

import abc
import asyncio
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from helmsman.api.closing import Closing
from helmsman.api.environment import EnvironmentVariable
from helmsman.api.fan_out import Fanout
from helmsman.api.forms import awaitable
from helmsman.api.jobs import Job as Job
from helmsman.api.jobs import NodePacking as NodePacking
from helmsman.api.jobs import PlacementStrategy as PlacementStrategy
from helmsman.api.jobs import SchedulingSpec as SchedulingSpec
from helmsman.api.jobs import SchedulingStrategy as SchedulingStrategy
from helmsman.api.plan import Node, Plan, Reservation
from helmsman.api.run_state import RunReporter
from helmsman.api.supervision import Monitor
from helmsman.api.workers import CONTROLLER as CONTROLLER
from helmsman.api.workers import Call as Call
from helmsman.api.workers import EngineSpec as EngineSpec
from helmsman.api.workers import PreemptionNotice as PreemptionNotice
from helmsman.api.workers import ProcessState as ProcessState
from helmsman.api.workers import ResultHandle as ResultHandle
from helmsman.api.workers import Timeouts as Timeouts
from helmsman.api.workers import Worker as Worker
from helmsman.api.workers import WorkerHealth as WorkerHealth
from helmsman.api.workers import WorkerState as WorkerState
from helmsman.api.workers import WorkerStatus as WorkerStatus
from helmsman.api.workers import id_of as id_of
from helmsman.api.workers import ids_of as ids_of


class Scheduler(Closing):
    """Starts workers and calls the engines in them.

    Use it as a context manager, or call ``close()``. All methods may be called from any thread, and
    the ``async`` ones from any event loop.
    """

    timeouts: Timeouts

    @property
    def n_gpus_per_node(self) -> int:
        """Number of accelerators per node (the maximum over all nodes); 0 without accelerators."""
        return max((node.num_devices for node in self.nodes()), default=0)

    @property
    def shares_process(self) -> bool:
        """Whether workers run in the script's process: one environment, no devices of their own."""
        return False

    @functools.cached_property
    def monitor(self) -> Monitor:
        """Monitor of the workers' health and preemption notices, shared by all controllers."""
        return Monitor(self.check_health, self.preemption_notices)

    @abc.abstractmethod
    def nodes(self) -> list[Node]:
        """List the live nodes with their total and free resources; close nodes are adjacent."""

    @abc.abstractmethod
    def create_workers(self, job: Job | Collection[Job]) -> list[str]:
        """Start the workers of one or several jobs and return their ids in the order of the jobs.

        Several jobs start together or not at all; after an error nothing of any job remains.
        Placing them together prevents a deadlock between two controllers that each hold half of the
        resources that both need. A colocated job may name another job of the call as its target.

        Raises:
            JobError: A job is invalid, or its role exists.
            StartError: The jobs could not start.
        """

    @abc.abstractmethod
    def plan(self, jobs: Job | Collection[Job]) -> Plan:
        """Compute where ``create_workers(jobs)`` would place every rank now; starts nothing.

        ``print(plan.table())`` shows the plan.

        Raises:
            JobError: A job is invalid, or its role exists.
            PlacementInfeasibleError: The jobs can never fit; states the smallest change that would
                fit.
            PlacementTimeoutError: The jobs do not fit now; names the holders of the resources.
        """

    @abc.abstractmethod
    def reserve(self, job: Job) -> list[Reservation]:
        """Reserve the resources of a job until delete_workers(role), without starting processes.

        Returns one reservation per replica. Jobs that are colocated with it by fork run on these
        resources and are deleted with it. On Ray, every device is a separate bundle, in one
        placement group per replica of a 'separate' job.

        Raises:
            JobError: The job is invalid, or its role exists. Nothing is reserved.
            StartError: The resources could not be reserved. Nothing is reserved.
        """

    @abc.abstractmethod
    def restart_worker(self, worker_id: str | Worker) -> None:
        """End a worker's process, if it is alive, and start a replacement with the same id.

        The replacement has new ports and no engines. It uses the same node and devices, unless that
        node has left or Ray reports that it is about to leave; then the worker is placed again, as
        a job of one. A worker that shares devices with another role's worker cannot be placed
        again.

        Raises:
            WorkerNotFoundError: The worker does not exist, or is removed meanwhile.
            InvalidSpecError: The worker belongs to another role.
            StartError: The replacement did not start. The worker counts as failed and may be
                restarted again.
        """

    @abc.abstractmethod
    def restart_workers(self, role: str, *, elsewhere: bool = False) -> None:
        """End all processes of a role, then start their replacements, for a new process group.

        Replacements start once the last old process has ended. They have the same ids, new ports
        and no engines.

        Args:
            role: The role.
            elsewhere: False: use the same nodes and devices. True: place the job again wherever it
                fits, as delete_workers and create_workers would; ids are renumbered if some were
                removed.

        Raises:
            RoleNotFoundError: The role does not exist.
            InvalidSpecError: The role's workers belong to another role, or are used by a role
                colocated without fork (with ``elsewhere``, by any other role).
            StartError: The replacements did not start. The workers count as failed and may be
                restarted again; with ``elsewhere`` the role no longer exists.
        """

    @abc.abstractmethod
    def scale(self, role: str, replicas: int) -> list[str]:
        """Resize a role to ``replicas`` live workers.

        New workers are each placed as a job of one, are ready and have no engines. Their ids
        continue after the highest that the role ever had. Shrinking ends the last workers as
        remove_workers does. The remaining workers are not affected.

        Args:
            role: The role.
            replicas: Number of workers.

        Returns:
            Ids of the new workers.

        Raises:
            RoleNotFoundError: The role does not exist.
            InvalidSpecError: ``replicas`` is below 1, the role's workers belong to another role,
                the role only holds devices, its replicas have individual specs, or another role
                uses its last workers.
            JobError: The job is invalid. The role is unchanged.
            StartError: New workers could not start. The role is unchanged.
            ShutdownIncompleteError: A worker could not be ended within the deadline.
        """

    @abc.abstractmethod
    def add_workers(self, role: str, count: int) -> list[str]:
        """Add workers to a role.

        Args:
            role: The role.
            count: Number of workers to add.

        Returns:
            Ids of the new workers.

        Raises:
            HelmsmanError: The errors of ``scale``.
        """

    @abc.abstractmethod
    def remove_workers(self, role: str, worker_ids: Sequence[str | Worker]) -> None:
        """End some workers of a role; the others keep their ids, and removed ids are not reused.

        Engines are destroyed first. The workers' resources are freed; a 'shared' job keeps its
        placement group until the last of its original workers ends. The caller decides whether the
        other workers can continue: ranks of one process group cannot. A removal that has begun
        completes even if its caller is interrupted.

        Args:
            role: The role.
            worker_ids: The workers, or their ids, in any position.

        Raises:
            RoleNotFoundError: The role does not exist.
            WorkerNotFoundError: A worker does not exist. No worker has been ended.
            InvalidSpecError: The workers are all workers of the role (use delete_workers), belong
                to another role, or are used by another role.
            ShutdownIncompleteError: A worker could not be ended within the deadline.
        """

    @abc.abstractmethod
    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        """Return the role's workers in rank order, once each has answered.

        Args:
            role: The role.
            timeout: Limit in seconds for all answers; 0 skips the check.

        Returns:
            The workers in rank order.

        Raises:
            RoleNotFoundError: The role does not exist.
            WorkerFailedError: A worker has died.
            CallTimeoutError: A worker did not answer in time.
        """

    @abc.abstractmethod
    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        """Destroy a role's engines and end its workers.

        Args:
            role: The role; None deletes all roles, of which there may be none.
            reverse_order: Whether to end rank 0 last.

        Raises:
            RoleNotFoundError: A named role does not exist.
            ShutdownIncompleteError: Something could not be removed within the deadline.
        """

    @abc.abstractmethod
    def fork_workers(self, role: str, target_role: str, command: str | None = None) -> list[str]:
        """Start a sibling process for each worker of a role, on the same node and devices.

        Args:
            role: Name of the new role.
            target_role: The role whose workers get siblings.
            command: Module and arguments that each sibling runs, as in ``SchedulingSpec.cmd``. Its
                engine is named 'command', so the default name is free.

        Returns:
            Ids of the new workers.

        Raises:
            RoleNotFoundError: The target role does not exist.
            JobError: The new role exists, or is invalid.
            StartError: The siblings could not start. None of them remains.
        """

    @abc.abstractmethod
    async def set_worker_env(self, worker_id: str | Worker, env: Mapping[str, str]) -> None:
        """Set environment variables in a worker, before its engines are created.

        Args:
            worker_id: The worker, or its id.
            env: Name -> value.

        Raises:
            WorkerNotFoundError: The worker does not exist.
            InvalidSpecError: No process can have the variable; or inline workers share one
                environment, and another worker has set another value.
            TypeError: A name or value is not a string.
        """

    @abc.abstractmethod
    async def check_health(
        self, worker_id: str | Worker, timeout: float | None = None
    ) -> WorkerHealth:
        """Return a worker's health; it answers even during a call.

        A worker that does not answer within half a second is observed from outside, so that its
        health is known within a second. This requires Linux. Inline workers share the script's
        interpreter, so a lock held there also blocks the script.

        Args:
            worker_id: The worker, or its id.
            timeout: Limit in seconds if the worker cannot be observed; ``timeouts.health_s`` if
                None.

        Returns:
            The worker's answer, or the observation (``WorkerHealth.answered`` is False).

        Raises:
            WorkerFailedError: The worker has died.
            CallTimeoutError: The worker does not answer and cannot be observed.
            WorkerNotFoundError: The worker does not exist.
        """

    @abc.abstractmethod
    async def preemption_notices(self) -> dict[str, PreemptionNotice]:
        """Return the notices of workers that are about to be preempted, by worker id.

        On Ray these are the workers on draining nodes: before a preemption, an autoscaler's removal
        or ``ray drain-node``, and after SIGTERM to ``ray start --block``. Ray itself ends a worker
        by SIGTERM, so a worker that receives it ends at once. A worker of the local scheduler
        reports SIGTERM with its next answer to check_health or status; it ends 25 s later, or at a
        second SIGTERM.
        """

    @abc.abstractmethod
    async def kill_worker(self, worker_id: str | Worker, cause: str) -> None:
        """End a worker's process at once, even if it is stopped. Its pending calls fail.

        Args:
            worker_id: The worker, or its id.
            cause: Reason for the WorkerFailedError of its calls, as a sentence part: 'was ended
                because it ...'.

        Raises:
            WorkerNotFoundError: The worker does not exist.
            ShutdownIncompleteError: The process could not be ended.
        """

    @abc.abstractmethod
    async def probe_rendezvous(self, role: str, address: str, port: int) -> None:
        """Check that a process group can form: rank 0 listens, and every rank connects to it.

        TrainController does this before it sets MASTER_ADDR and MASTER_PORT.

        Args:
            role: The role.
            address: Address of rank 0.
            port: Port on which rank 0 listens.

        Raises:
            RendezvousError: Rank 0 cannot listen, or a rank cannot connect.
            RoleNotFoundError: The role does not exist.
            WorkerFailedError: A worker has died.
        """

    @abc.abstractmethod
    async def create_engine(
        self,
        worker_id: str | Worker,
        engine: str | Callable[..., Any] | EngineSpec,
        engine_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Build ``engine(*args, **kwargs)`` in the worker.

        Args:
            worker_id: The worker, or its id.
            engine: Import path 'package.module.Class'; a class or other callable that returns the
                engine (sent by cloudpickle if it is not importable); or an EngineSpec.
            engine_name: Name of the engine in the worker; the worker's id if None.
            *args: Positional arguments of the engine.
            **kwargs: Named arguments of the engine.

        Raises:
            WorkerNotFoundError: The worker does not exist.
            EngineImportError: The import path cannot be resolved in the worker.
            EngineCreationError: The constructor raised.
            EngineExistsError: The worker already holds an engine of this name.
            CallTimeoutError: The constructor did not return within ``timeouts.create_engine_s``.
            WorkerFailedError: The worker died.
        """

    @abc.abstractmethod
    def create_engines(
        self,
        worker_ids: Collection[str | Worker],
        engine: str | Callable[..., Any] | EngineSpec,
        engine_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Build the same engine in several workers at once, and wait for all of them.

        Args:
            worker_ids: The workers, or their ids.
            engine: Import path, callable or EngineSpec; see create_engine.
            engine_name: Name of the engine in each worker; the worker's id if None.
            *args: Positional arguments of the engine.
            **kwargs: Named arguments of the engine.

        Raises:
            HelmsmanError: The first error of create_engine, in the order of the workers. All other
                attempts have ended by then.
        """

    async def async_create_engines(
        self,
        worker_ids: Collection[str | Worker],
        engine: str | Callable[..., Any] | EngineSpec,
        engine_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Await create_engines.

        Args:
            worker_ids: The workers, or their ids.
            engine: Import path, callable or EngineSpec; see create_engine.
            engine_name: Name of the engine in each worker; the worker's id if None.
            *args: Positional arguments of the engine.
            **kwargs: Named arguments of the engine.

        Raises:
            HelmsmanError: The first error of create_engine, in the order of the workers.
        """
        ids = ids_of(worker_ids)
        starts = [self.create_engine(id_, engine, engine_name, *args, **kwargs) for id_ in ids]
        for outcome in await asyncio.gather(*starts, return_exceptions=True):
            if outcome is not None:
                raise outcome

    @abc.abstractmethod
    def call_engine(
        self,
        worker_id: str | Worker,
        method: str,
        engine_name: str | None = None,
        *args: Any,
        rpc_meta: Mapping[str, Any] | None = None,
        rpc_timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method of an engine and return its result.

        The call is sent once and never again.

        Args:
            worker_id: The worker, or its id.
            method: Name of the method.
            engine_name: Name of the engine; the worker's id if None.
            *args: Positional arguments of the method.
            rpc_timeout: Limit in seconds; ``timeouts.call_s`` if None.
            rpc_meta: Options of the call. {"broadcast": bool}: whether arguments given to the
                data-parallel head reach its model-parallel group. {"keep": True}: leave the result
                in the worker and return a ResultHandle, which may be an argument of any other call.
                {"discard": True}: drop the result there and return None. {"kwargs": {...}}: more
                named arguments, for names such as 'method' that call_engine itself uses.
            **kwargs: Named arguments of the method.

        Returns:
            The method's result, or a ResultHandle.

        Raises:
            CallError: The call failed; the subclasses in helmsman.api.errors state the reason.
        """

    @abc.abstractmethod
    async def async_call_engine(
        self,
        worker_id: str | Worker,
        method: str,
        engine_name: str | None = None,
        *args: Any,
        rpc_meta: Mapping[str, Any] | None = None,
        rpc_timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Await call_engine.

        Tensor arguments must not be written to before the await ends. Cancelling the await does not
        undo a call that has begun.

        Args:
            worker_id: The worker, or its id.
            method: Name of the method.
            engine_name: Name of the engine; the worker's id if None.
            *args: Positional arguments of the method.
            rpc_meta: Options of the call; see call_engine.
            rpc_timeout: Limit in seconds; ``timeouts.call_s`` if None.
            **kwargs: Named arguments of the method.

        Returns:
            The method's result, or a ResultHandle.

        Raises:
            CallError: The call failed; the subclasses in helmsman.api.errors state the reason.
        """

    def call_many(
        self,
        calls: Mapping[str, Call],
        method: str,
        engine_name: str | None = None,
        timeout: float | None = None,
        *,
        all_or_none: bool = False,
    ) -> Fanout:
        """Begin a call of ``method`` on several workers; for use on Helmsman's own event loop.

        A call that cannot begin is recorded as a failure of its worker. This default implementation
        uses async_call_engine, which sends the others.

        Args:
            calls: Worker id -> the arguments of its call.
            method: Name of the method.
            engine_name: Name of the engine; each worker's id if None.
            timeout: Limit in seconds for every call; ``timeouts.call_s`` if None.
            all_or_none: True sends no call if the arguments of one cannot be serialized, for
                workers that would wait for each other.

        Returns:
            The pending calls.
        """
        fanout = Fanout()
        for worker_id, (args, kwargs, rpc_meta, _) in calls.items():
            # A named argument such as 'timeout' belongs to the method.
            meta = {**(rpc_meta or {}), "kwargs": kwargs} if kwargs else rpc_meta
            call = self.async_call_engine(
                worker_id, method, engine_name, *args, rpc_meta=meta, rpc_timeout=timeout
            )
            fanout.expect_awaitable(worker_id, call)
        return fanout

    @abc.abstractmethod
    def put(self, value: Any) -> ResultHandle:
        """Pack a value once, to pass it to many calls until ``release``.

        Each node receives the value at most once.

        Raises:
            NotSerializableError: The value cannot be pickled.
        """

    @abc.abstractmethod
    def get(self, handle: ResultHandle) -> Any:
        """Fetch the value of a handle into the script.

        Raises:
            HandleLostError: The value no longer exists.
        """

    @abc.abstractmethod
    def release(self, handle: ResultHandle) -> None:
        """Release the value of ``handle`` in its worker.

        Idempotent; does nothing if the worker or this scheduler no longer exists.
        """

    def advise(self, role: str, next_step: str) -> None:
        """Set the next step in the WorkerFailedErrors of a role; for controllers.

        Args:
            role: The role.
            next_step: The text; '' restores the scheduler's own.
        """

    @property
    def reporter(self) -> RunReporter:
        """Receives the phases and figures of the script, for ``helmsman status`` and ``why``."""
        return RunReporter()

    @property
    @abc.abstractmethod
    def log_dir(self) -> Path:
        """Folder of the run's logs: a file per worker, and driver.log."""

    @abc.abstractmethod
    def status(self) -> list[WorkerStatus]:
        """Return the status of all workers under one short deadline, dead workers included."""

    @abc.abstractmethod
    def stacks(self, role: str) -> dict[str, str]:
        """Return the Python stacks of all threads by worker id, or why a worker did not answer."""

    @abc.abstractmethod
    def environment(self, role: str) -> dict[str, list[EnvironmentVariable]]:
        """Return the environment variables of a role's workers, and their sources, by worker id.

        Variables are sorted by name; secrets are masked in the worker. A fixed list of variables is
        forwarded from the script's environment (``helmsman env`` shows it);
        ``SchedulingSpec.env_vars`` override everything. Thread counts follow
        ``SchedulingSpec.cpu``, except on the inline scheduler, whose workers have the script's own
        environment.

        Raises:
            RoleNotFoundError: The role does not exist.
            WorkerFailedError: A worker has died.
            CallTimeoutError: A worker did not answer in time.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End everything that this scheduler started.

        Idempotent; works after a half-failed start and with dead workers.
        """

    # --- awaitable forms of the blocking operations above -----------------------------------------

    async_nodes = awaitable(nodes)
    async_create_workers = awaitable(create_workers)
    async_plan = awaitable(plan)
    async_reserve = awaitable(reserve)
    async_restart_worker = awaitable(restart_worker)
    async_restart_workers = awaitable(restart_workers)
    async_scale = awaitable(scale)
    async_add_workers = awaitable(add_workers)
    async_remove_workers = awaitable(remove_workers)
    async_get_workers = awaitable(get_workers)
    async_delete_workers = awaitable(delete_workers)
    async_fork_workers = awaitable(fork_workers)
    async_put = awaitable(put)
    async_get = awaitable(get)
    async_status = awaitable(status)
    async_stacks = awaitable(stacks)
    async_environment = awaitable(environment)
    async_release = awaitable(release)
