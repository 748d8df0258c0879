"""The contract between a controller script and whatever runs its workers.

A script describes a Job, a Scheduler starts its workers, and engines in those workers are created
and called by worker id. Names follow the field's existing Scheduler API, so that scripts written to
it carry over.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from helmsman.api.closing import Closing
from helmsman.api.environment import EnvironmentVariable
from helmsman.api.errors import InvalidSpecError
from helmsman.api.fan_out import Fanout
from helmsman.api.faults import Fault, Injection
from helmsman.api.forms import awaitable
from helmsman.api.plan import Node, Plan, Reservation
from helmsman.api.suggestions import Suggesting
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

PlacementStrategy = Literal["shared", "separate", "deferred"]
NodePacking = Literal["pack", "spread", "strict_spread"]
StrategyType = Literal["separation", "colocation"]


class SchedulingSpec(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """What one worker needs."""

    cpu: float = 1
    """CPU cores. Thread counts (OMP_NUM_THREADS and its like, torch's) are these, 1 at least."""
    gpu: float = 0
    """Accelerators of whatever kind the cluster has."""
    mem: float = 0
    """Memory in GB (10^9 bytes); 0 asks for none in particular."""
    port_count: int = 0
    """Ports leased to the worker for its engine, below the ephemeral range or in
    HELMSMAN_PORT_RANGE ('20000-20200'). No other worker of any run on the node is given them until
    this one ends. A worker with a ``cmd`` has one at least."""
    env_vars: dict[str, str] = {}
    """Environment variables of the worker; they win over everything that is forwarded."""
    cmd: str | None = None
    """Module and arguments to run (``python -m``) as the worker's child, which ends with it; None
    for engines alone. Quoted as for a shell; ``{port0}``, ``{port1}``, ... are the worker's leased
    ports, ``{port}`` the first; HELMSMAN_PORTS has all."""
    ray_placement_strategy: PlacementStrategy = "shared"
    """shared: one placement group, a bundle per worker; separate: a group per worker; deferred: a
    group per instance whose devices are left to the server that the worker launches."""
    resources: dict[str, float] = {}
    """Extra custom resources by name."""
    node_labels: dict[str, str] = {}
    """Labels that the worker's node must carry. A value may also be '!x', 'in(x, y)' or '!in(x,
    y)', as Ray's selectors have it."""
    accelerator_type: str | None = None
    """Accelerator model that the worker's node must have, as Ray names it."""
    nodelist: Sequence[str] = ()
    """Addresses, host names or ids of the only nodes that may be used; empty for all."""
    exclude: Sequence[str] = ()
    """Addresses, host names or ids of nodes that must not be used."""
    node_packing: NodePacking = "pack"
    """pack: on as few nodes as possible, leaving whole nodes free; spread: over as many as
    possible; strict_spread: never two of the job's bundles on one node."""


class SchedulingStrategy(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """Where a job's workers go in relation to another role's."""

    type: StrategyType = "separation"
    """separation: resources of its own; colocation: those of ``target``."""
    target: str | None = None
    """Role to colocate with."""
    fork: bool = False
    """With colocation: False reuses the target's workers (engines are told apart by name), True
    gives each a sibling process."""
    device_mapping: Sequence[Sequence[int]] = ()
    """With fork: for each replica the devices of the target that it gets, counted over the target's
    workers in rank order, on one node. Several replicas may get the same device. Empty: neighbours
    share evenly."""


class Job(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """One role of the run: ``replicas`` workers with the specs ``tasks``."""

    role: str
    """Name of the role; workers are 'role/0', 'role/1', ..."""
    replicas: int = 1
    tasks: Sequence[SchedulingSpec] = (SchedulingSpec(),)
    """One spec for all replicas, or one for each."""
    scheduling_strategy: SchedulingStrategy = SchedulingStrategy()

    def validate(self) -> None:
        """Raise a JobError unless the job makes sense on its own, whatever the cluster."""
        self._require_types()
        if not self.role or "/" in self.role or self.role != self.role.strip():
            raise self._wrong("role", self.role, "a name without '/' or outer blanks")
        if self.replicas < 1:
            raise self._wrong("replicas", self.replicas, "1 or more")
        if len(self.tasks) not in (1, self.replicas):
            expected = f"1 spec, which all replicas share, or {self.replicas}, one for each"
            raise self._wrong("the number of tasks", len(self.tasks), expected)
        for spec in self.tasks:
            amounts = {field: getattr(spec, field) for field in ("cpu", "gpu", "mem", "port_count")}
            amounts |= {f"resources[{name!r}]": amount for name, amount in spec.resources.items()}
            for field, amount in amounts.items():
                if not (0 <= amount < math.inf):
                    raise self._wrong(field, amount, "0 or more")
            if spec.gpu != int(spec.gpu):
                raise self._wrong(
                    "gpu", spec.gpu, "a whole number; colocate roles to share a device"
                )
        for field in ("ray_placement_strategy", "node_packing"):
            values = sorted({getattr(spec, field) for spec in self.tasks})
            if len(values) > 1:
                raise self._wrong(field, values, "the same for all tasks of a job")
        strategy = self.scheduling_strategy
        if strategy.type == "colocation" and not strategy.target:
            raise self._wrong(
                "scheduling_strategy.target", strategy.target, "the role to colocate with"
            )
        if strategy.type == "separation" and (strategy.target or strategy.fork):
            raise self._wrong(
                "scheduling_strategy", strategy, "target and fork only with colocation"
            )
        if strategy.device_mapping:
            self._require_mapping(strategy)

    def _require_mapping(self, strategy: SchedulingStrategy) -> None:
        """Which devices the target has is known later; see colocation.tile."""
        field, mapping = "scheduling_strategy.device_mapping", strategy.device_mapping
        if not strategy.fork:
            raise self._wrong(field, mapping, "only with colocation and fork")
        if len(mapping) != self.replicas:
            raise self._wrong(field, mapping, f"an entry for each of the {self.replicas} replicas")
        for index, devices in enumerate(mapping):
            if not devices or min(devices) < 0 or len(set(devices)) < len(devices):
                raise self._wrong(
                    f"{field}[{index}]", devices, "devices from 0 on, each once, at least one"
                )

    def _wrong(self, field: str, value: Any, expected: str) -> InvalidSpecError:
        return InvalidSpecError(role=str(self.role), field=field, value=value, expected=expected)

    def _require_types(self) -> None:
        """Structs made in Python are not checked by msgspec; a misspelt strategy would otherwise be
        taken for another one.
        """
        try:
            msgspec.convert(msgspec.to_builtins(self, enc_hook=_as_number), type=Job)
        except (msgspec.ValidationError, TypeError, NotImplementedError) as error:
            reason, _, where = str(error).partition(" - at `$.")
            field = where.rstrip("`") or "job"
            choices = _CHOICES.get(field.rpartition(".")[2])
            expected = (
                f"one of {', '.join(map(repr, choices))}"
                if choices
                else reason.removeprefix("Expected ").replace("`", "")
            )
            raise self._wrong(field, _at(self, field), expected) from error

    def spec(self, index: int) -> SchedulingSpec:
        """The spec of replica ``index``."""
        return self.tasks[0] if len(self.tasks) == 1 else self.tasks[index]


_CHOICES = {
    "ray_placement_strategy": get_args(PlacementStrategy),
    "node_packing": get_args(NodePacking),
    "type": get_args(StrategyType),
}


def _as_number(value: Any) -> Any:
    """A number of numpy's as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise NotImplementedError(f"Expected plain values, got `{type(value).__name__}`")


def _at(job: Job, path: str) -> Any:
    """The value at a path such as 'tasks[0].gpu'; the job itself where it leads nowhere."""
    value: Any = job
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        try:
            value = getattr(value, name) if name else value[int(index)]
        except (AttributeError, LookupError, TypeError):
            break
    return value


class Scheduler(Closing):
    """Starts workers and calls the engines in them.

    Use it as a context manager, or call ``close()``. All methods may be called from any thread; the
    ``async`` ones from any event loop.
    """

    timeouts: Timeouts

    @property
    def n_gpus_per_node(self) -> int:
        """Accelerators on each node of the cluster (the most that any node has); 0 without
        accelerators.
        """
        return max((node.num_devices for node in self.nodes()), default=0)

    @property
    def shares_process(self) -> bool:
        """Whether the workers live in the script's own process, and so have one environment and no
        devices of their own.
        """
        return False

    @functools.cached_property
    def monitor(self) -> Monitor:
        """Watches the workers by ``check_health`` and ``preemption_notices`` for all controllers of
        this scheduler.
        """
        return Monitor(self.check_health, self.preemption_notices)

    @abc.abstractmethod
    def nodes(self) -> list[Node]:
        """The nodes that live, neighbours together, with what each has and what of it is free."""

    @abc.abstractmethod
    def create_workers(self, job: Job | Collection[Job]) -> list[str]:
        """Start the workers of a job, or of several jobs together, and return their ids in the
        order of the jobs.

        Several jobs start together or not at all; on an error nothing of any of them remains. They
        are placed together, so two controllers that each need what the other has half of cannot
        starve each other. A colocated job may name another of them as its target.

        Raises: JobError (a job makes no sense, or its role exists), StartError (it could not
            start).
        """

    @abc.abstractmethod
    def plan(self, jobs: Job | Collection[Job]) -> Plan:
        """Where ``create_workers(jobs)`` would put every rank now; starts nothing.
        ``print(plan.table())`` shows it.

        Raises: JobError; PlacementInfeasibleError (never on this cluster, with the smallest change
        that would fit); PlacementTimeoutError (not now, with who holds what is missing).
        """

    @abc.abstractmethod
    def reserve(self, job: Job) -> list[Reservation]:
        """Hold what the replicas of a job need without starting a process for any, until
        delete_workers(role).

        Jobs that are colocated with it with fork run there, and go with it. On Ray every device is
        a bundle of its own, in a placement group for each replica of a 'separate' job.

        Raises: as create_workers; nothing is held then.
        """

    @abc.abstractmethod
    def restart_worker(self, worker_id: str | Worker) -> None:
        """End a worker's process, if it lives, and start another in its place.

        It has the same id, but new ports and no engines. It is on the same node and devices unless
        that node is gone, or is about to go, as Ray tells: then it is placed anew, as a job of one.
        One that shares the devices of another role's worker cannot be placed anew.

        Raises: WorkerNotFoundError, also when it is removed meanwhile; InvalidSpecError for a
        worker that belongs to another role; StartError, after which the worker counts as failed and
        may be restarted again.
        """

    @abc.abstractmethod
    def restart_workers(self, role: str, *, elsewhere: bool = False) -> None:
        """End all processes of a role, and start as many anew once the last of them has ended:
        ranks of one process group.

        They are on the same nodes and devices or, with ``elsewhere``, wherever the job fits now, as
        after delete_workers and create_workers. They have the same ids, new ports and no engines;
        ``elsewhere`` numbers them anew where some were removed.

        Raises: RoleNotFoundError; InvalidSpecError for a role whose workers are another's, or are
            used by a role that is colocated without fork, or with ``elsewhere`` by any other role;
            StartError, after which the workers count as failed and may be restarted again or, with
            ``elsewhere``, the role is gone.
        """

    @abc.abstractmethod
    def scale(self, role: str, replicas: int) -> list[str]:
        """Let a role have so many workers that live: more at its end, placed as a job of one each,
        or fewer, the last ones ended as by remove_workers.

        New workers are ready and have no engines; their ids go on after the highest that the role
        ever had. Workers that stay are not touched.

        Returns: ids of the workers that are new.
        Raises: as create_workers, and then the role is as it was; RoleNotFoundError;
            InvalidSpecError for a role whose workers are another's, whose replicas have specs of
            their own, or on whose last workers another role stands.
        """

    @abc.abstractmethod
    def add_workers(self, role: str, count: int) -> list[str]:
        """Let a role have so many workers more than it has, as ``scale`` does; returns their
        ids.
        """

    @abc.abstractmethod
    def remove_workers(self, role: str, worker_ids: Sequence[str | Worker]) -> None:
        """End these workers of a role, whichever they are; the others keep their ids, and these are
        never given again.

        Their engines are destroyed first. What they held is free again, but for a worker of a
        'shared' job, whose placement group goes with the last of those that it was made for.
        Whether the others can go on without them is the caller's to know: ranks of one process
        group cannot. A removal that has begun is finished, also when its caller is interrupted.

        Raises: RoleNotFoundError, WorkerNotFoundError, and then nothing has been ended;
            InvalidSpecError for all workers of a role (delete_workers), for workers that are
            another's, or on which another role stands; ShutdownIncompleteError.
        """

    @abc.abstractmethod
    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        """The role's workers in rank order, each having answered within ``timeout`` seconds; 0 asks
        nobody.

        Raises: RoleNotFoundError, WorkerFailedError, CallTimeoutError.
        """

    @abc.abstractmethod
    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        """Destroy the role's engines and end its workers (None: all roles); ``reverse_order`` ends
        rank 0 last.

        Deleting what is not there is an error for a named role (RoleNotFoundError) and nothing for
        None. Raises: ShutdownIncompleteError.
        """

    @abc.abstractmethod
    def fork_workers(self, role: str, target_role: str, command: str | None = None) -> list[str]:
        """Give each worker of ``target_role`` a sibling process in ``role``, on the same node and
        devices.
        """

    @abc.abstractmethod
    async def set_worker_env(
        self, worker_id: str | Worker | Worker, env: Mapping[str, str]
    ) -> None:
        """Set environment variables in a worker, before its engines are created."""

    @abc.abstractmethod
    async def check_health(
        self, worker_id: str | Worker | Worker, timeout: float | None = None
    ) -> WorkerHealth:
        """Ask a worker whether it is there; it answers beside a call that runs.

        A worker that does not answer within half a second is observed from outside, so that its
        health is known within a second. This needs Linux. Inline workers share the script's
        interpreter, so a lock that is held there holds up the script, too.

        Args:
            timeout: seconds for a worker that cannot be observed; ``timeouts.health_s`` when None.
        Returns: its answer, or the observation (``WorkerHealth.answered`` is False).
        Raises: WorkerFailedError when it has died, CallTimeoutError when it neither answers nor can
            be observed, WorkerNotFoundError.
        """

    @abc.abstractmethod
    async def inject(self, fault: Fault) -> list[Injection]:
        """Have a worker do this to itself now, whatever the fault's step, to see that the run
        survives it; see FaultPlan.

        It costs other calls nothing. A worker that does not answer cannot be told, and nothing is
        inflicted on it later.

        Returns: what became of it at each worker that it concerns; a DropNode concerns all workers
            of this run on the node.
        Raises: WorkerNotFoundError; FaultsUnsupportedError where workers are no processes of their
            own.
        """

    @abc.abstractmethod
    async def preemption_notices(self) -> dict[str, PreemptionNotice]:
        """Workers that are about to go, by id.

        On Ray these are the workers of nodes that are being drained: before a preemption, by an
        autoscaler or by ``ray drain-node``, and where ``ray start --block`` was sent SIGTERM. A
        worker of the local scheduler is one once it was sent SIGTERM, which it says with its next
        answer to check_health or status; it ends 25 s later, or at a second one. On Ray, SIGTERM
        ends a worker at once, since it is how Ray itself ends them.
        """

    @abc.abstractmethod
    async def kill_worker(self, worker_id: str | Worker | Worker, cause: str) -> None:
        """End a worker's process at once, whatever it does, such as one that is stopped. Calls that
        wait for it fail.

        Args:
            cause: why, for the WorkerFailedError of its calls, as part of a sentence: 'was ended
                because it ...'.
        Raises: WorkerNotFoundError; ShutdownIncompleteError.
        """

    @abc.abstractmethod
    async def probe_rendezvous(self, role: str, address: str, port: int) -> None:
        """Try whether a process group of the role can meet: rank 0 listens on ``port``, every rank
        connects to ``address``.

        TrainController does so before it sets MASTER_ADDR and MASTER_PORT.
        Raises: RendezvousError, RoleNotFoundError, WorkerFailedError.
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
            engine: import path 'package.module.Class', or a class or another callable that returns
                the engine (sent by cloudpickle when it is not importable), or an EngineSpec that
                says more.
            engine_name: its name in the worker; the worker's id when None.
        Raises: WorkerNotFoundError, EngineImportError, EngineCreationError, EngineExistsError,
        CallTimeoutError, WorkerFailedError.
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
            engine: As for create_engine.
            engine_name: Its name in each worker; the worker's id when None.
            *args: Positional arguments of the engine.
            **kwargs: Named arguments of the engine.

        Raises:
            HelmsmanError: The first error of create_engine, in the order of the workers. The
                others have ended then, too.
        """

    async def async_create_engines(
        self,
        worker_ids: Collection[str | Worker],
        engine: str | Callable[..., Any] | EngineSpec,
        engine_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Build the same engine in several workers at once; see create_engines."""
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
        """Call a method of an engine and return its result. The call is sent once and never again.

        Args:
            worker_id: The worker, or its id.
            method: Name of the method.
            engine_name: The worker's id when None.
            *args: The method's positional arguments.
            rpc_timeout: seconds; ``timeouts.call_s`` when None.
            rpc_meta: {"broadcast": bool} whether arguments given to the data-parallel head reach
                its model-parallel group; {"keep": True} leaves the result in the worker and returns
                a ResultHandle, which may be an argument of any other call; {"discard": True} drops
                the result there and returns None; {"kwargs": {...}} are named arguments beside
                ``kwargs``, for a method whose names, such as 'method', this call takes itself.
            **kwargs: The method's named arguments.
        Raises: a CallError that says what happened; see helmsman.api.errors.
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
        """As call_engine, awaited. Tensors among the arguments must not be written to before it is
        done. Cancelling the await does not undo a call that has begun.
        """

    def call_many(
        self,
        calls: Mapping[str, Call],
        method: str,
        engine_name: str | None = None,
        timeout: float | None = None,
    ) -> Fanout:
        """Begin a call of ``method`` on each of these workers; it is used on Helmsman's own event
        loop.

        A call that cannot be begun is a failure of its worker in the fan-out and does not affect
        the others. This default makes them by async_call_engine.

        Args:
            calls: worker id -> the arguments of its call.
            engine_name, timeout: as for call_engine, for all calls.
        """
        fanout = Fanout()
        for worker_id, (args, kwargs, rpc_meta, _) in calls.items():
            # a 'timeout' among them is the method's
            meta = {**(rpc_meta or {}), "kwargs": kwargs} if kwargs else rpc_meta
            call = self.async_call_engine(
                worker_id, method, engine_name, *args, rpc_meta=meta, rpc_timeout=timeout
            )
            fanout.expect_awaitable(worker_id, call)
        return fanout

    @abc.abstractmethod
    def put(self, value: Any) -> ResultHandle:
        """Pack a value once, for arguments of many calls, until ``release``. It moves to each node
        once, whoever asks for it.

        Raises: NotSerializableError.
        """

    @abc.abstractmethod
    def get(self, handle: ResultHandle) -> Any:
        """The value of a handle, here. Raises: HandleLostError."""

    @abc.abstractmethod
    def release(self, handle: ResultHandle) -> None:
        """Let the worker that keeps the value of ``handle`` forget it. Idempotent; nothing happens
        when that worker, or this scheduler, is gone.
        """

    def advise(self, role: str, next_step: str) -> None:
        """Set the next step that WorkerFailedErrors of a role suggest; '' restores the scheduler's
        own. For controllers.
        """

    @abc.abstractmethod
    def status(self) -> list[WorkerStatus]:
        """Every worker of every role, asked for its health under one short deadline. Never raises
        for a dead worker.
        """

    @abc.abstractmethod
    def stacks(self, role: str) -> dict[str, str]:
        """The Python stacks of all threads of each of the role's workers; a line saying why for one
        that does not answer.
        """

    @abc.abstractmethod
    def environment(self, role: str) -> dict[str, list[EnvironmentVariable]]:
        """Each variable of the role's workers, by worker id, sorted by name, and who set it.
        Secrets are masked in the worker.

        What is forwarded from the script's environment is a list (``helmsman env`` shows it);
        ``SchedulingSpec.env_vars`` win over everything. Thread counts follow
        ``SchedulingSpec.cpu``, except on the inline scheduler, whose workers have the script's own
        environment.

        Raises: RoleNotFoundError, WorkerFailedError, CallTimeoutError.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End everything this scheduler started. Idempotent; works after a half-failed start and
        with dead workers.
        """

    # --- the awaited form of each blocking operation above ---------------------------------------

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
