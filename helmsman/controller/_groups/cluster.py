"""Cluster: a named group of one role's workers, whose methods are called on its ranks."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from helmsman._base.event_loop import forbid_blocking, run_sync, submit
from helmsman.api.device_mapping import parse_device_mapping, wrong_mapping
from helmsman.api.dispatch import CustomDispatch, MethodSpec
from helmsman.api.errors import DispatchError, WorkerFailedError
from helmsman.api.plan import ranges
from helmsman.api.scheduler import (
    EngineSpec,
    Job,
    ResultHandle,
    SchedulingSpec,
    SchedulingStrategy,
    Worker,
    WorkerState,
    WorkerStatus,
)
from helmsman.api.worker_group import (
    ClusterConfig,
    GroupFuture,
    Options,
    RegisteredMethod,
)
from helmsman.controller._groups import dispatch
from helmsman.controller._groups.call_order import (
    CallOrder,
    PackedArguments,
    compare_coordinates,
)
from helmsman.controller._groups.calls import CallSurface, RankFutures
from helmsman.controller._groups.cluster_handle import (
    ClusterDesk,
    ClusterHandle,
    address_for_others,
)
from helmsman.controller._groups.resource_manager import (
    Allocation,
    Device,
    ResourceManager,
)
from helmsman.controller._groups.role_controller import RoleController, rank_environment
from helmsman.controller._scheduler.argument_names import require_engine_arguments
from helmsman.controller._scheduler.argument_types import require_seconds

W_co = TypeVar("W_co", covariant=True)

_EXACTLY = {"broadcast": False}
"""Arguments go to each rank as dispatched; workers do not broadcast them to each other."""
_OF_INSTANCES = (
    "name",
    "resource_manager",
    "worker_config",
    "topology",
    "scheduler",
    "job",
    "engine_name",
)
"""Instance attributes of a Cluster; a subclass must not declare methods of these names."""


class Cluster(RoleController, CallSurface[W_co]):
    """A named group of workers of one class, on devices of a ResourceManager.

    It runs on any scheduler. The constructor starts the workers and builds an instance of the class
    in each; if it fails, everything it started is removed.

    Call methods that the class declares with ``register`` by
    ``cluster.method(Actor.log_probs)(batch)``, or name them in a subclass to get methods of the
    cluster::

        class ActorCluster(Cluster[Actor]):
            log_probs = Actor.log_probs

    Call undeclared methods by name: ``execute_all_sync("log_probs", Shard(batch), 0.7)``. Only
    arguments marked as a Shard are split; all others are replicated.

    Before the first call that splits rows along an axis, the cluster calls ``get_rank_info()`` once
    on each worker whose class has it. The method returns a RankInfo, or a mapping of some of its
    fields. TopologyMismatchError lists the workers whose coordinates differ from the controller's.

    Args:
        name: Role of the workers, whose ids are 'name/0', 'name/1', ...
        worker_cls: A class, a Ray actor class, or an import path 'package.module.Class'.
        resource_manager: Provides the devices, nodes and scheduler.
        worker_config: Number of workers, devices and parallel sizes.
        args: Positional arguments of the class's constructor, the same on every rank.
        kwargs: Keyword arguments of the class's constructor, the same on every rank.

    Raises:
        TypeError: ``worker_cls`` is not a class or an import path.
        JobError: The configuration or a keyword argument is invalid, or the role exists.
        StartError: The workers could not start.
        CallError: An instance could not be built, such as EngineCreationError.
        GroupCallError: Instances of several ranks could not be built; the root cause comes first.
    """

    _ready_methods = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if isinstance(value, RegisteredMethod) and (
                hasattr(Cluster, name) or name in _OF_INSTANCES
            ):
                raise DispatchError(
                    method=f"{cls.__qualname__}.{name}",
                    reason=f"a Cluster already has an attribute {name!r}, which "
                    f"{value.spec.full_name} would hide",
                    step="Assign the method to another name, or remove it from the class and call "
                    f"cluster.method({value.spec.full_name})",
                )

    def __init__(
        self,
        name: str,
        worker_cls: type[W_co] | str | Any,
        resource_manager: ResourceManager,
        worker_config: ClusterConfig,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.resource_manager = resource_manager
        self.worker_config = worker_config
        engine = _plain_class(worker_cls)
        require_engine_arguments(name, engine, kwargs or {})
        self.topology = worker_config.topology(name)
        world_size = self.topology.world_size
        self._allocation = resource_manager.allocate_placement_group(
            world_size, worker_config.device_mapping, holder=name, num_cpus=worker_config.num_cpus
        )
        self._kwargs = dict(kwargs or {})
        self._order = CallOrder(
            name,
            worker_config.max_concurrency,
            functools.partial(compare_coordinates, name, engine, self.topology, self._call_workers),
        )
        self._restarting = threading.Lock()
        self._desk: ClusterDesk | None = None
        self._making_desk = threading.Lock()
        try:
            job = _job_of(name, resource_manager, worker_config, self._allocation)
            super().__init__(resource_manager.scheduler, engine, job, args)
            self.initialize()
        except BaseException:
            resource_manager.free(name)
            raise

    # --- topology and placement -------------------------------------------------------------------

    @property
    def rank_to_devices(self) -> dict[int, tuple[Device, ...]]:
        """Devices of each rank; empty for workers without devices."""
        return {worker.rank: worker.devices for worker in self._allocation.workers}

    def workers_on(self, devices: str | Sequence[int]) -> list[Worker]:
        """Return the workers that hold any of these devices, in rank order.

        Args:
            devices: Device numbers of the ResourceManager, written as in a device_mapping.

        Raises:
            InvalidSpecError: The numbers are malformed, or none of them is a device of the cluster.
        """
        wanted = set(parse_device_mapping(devices, self.name))
        found = [
            worker.rank
            for worker in self._allocation.workers
            if wanted & {device.index for device in worker.devices}
        ]
        if not found:
            own = [device.index for device in self._allocation.devices]
            raise wrong_mapping(
                self.name,
                devices,
                f"at least one of the cluster's devices, {ranges(own) or 'none'}",
            )
        return [self.workers[rank] for rank in found]

    @property
    def rank_to_node(self) -> dict[int, int]:
        """Index of each rank's node in the ResourceManager."""
        return {worker.rank: worker.node_rank for worker in self._allocation.workers}

    @property
    def colocated_with(self) -> tuple[str, ...]:
        """Clusters that already held one of this cluster's devices when it started."""
        return self._allocation.colocated_with

    @property
    def master_address(self) -> str:
        """Address of rank 0's node, for the rendezvous of a process group."""
        return self.workers[0].ip

    @property
    def master_port(self) -> int:
        """Port on rank 0's node for the rendezvous, leased to rank 0."""
        return int(self.workers[0].engine_ports[0])

    def table(self) -> str:
        """Format one line per rank: worker, node, devices and coordinates."""
        rows = []
        for placed, worker in zip(self._allocation.workers, self.workers, strict=True):
            devices = ",".join(str(device.index) for device in placed.devices) or "-"
            rows.append(
                f"{worker.id:<24} node {placed.node_rank} ({worker.ip})  devices {devices:<8} "
                f"{self.get_rank_info(placed.rank)}"
            )
        return "\n".join(rows)

    def __repr__(self) -> str:
        return f"<Cluster {self.name!r} of {self.world_size} ranks>"

    # --- calls ------------------------------------------------------------------------------------

    def _begin(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options
    ) -> GroupFuture[Any]:
        """Start a call without blocking.

        Arguments are packed here, in the caller's thread. Before a call that splits rows, the
        workers' coordinates are checked, on Helmsman's event loop.
        """
        self._check_started()
        if options.keep and (
            isinstance(spec.dispatch_mode, CustomDispatch) or callable(spec.collect)
        ):
            raise DispatchError(
                method=spec.full_name,
                reason="keep=True leaves the results in the workers, but the method's own collect "
                "function combines them in the controller",
                step="Call it without keep, or declare Collect.LIST and call the function on the "
                "workers",
            )
        require_seconds(f"{self.name}.{spec.name}", options.timeout)
        deadline = time.monotonic() + (
            self.scheduler.timeouts.call_s if options.timeout is None else options.timeout
        )
        dispatched = dispatch.dispatch(self.topology, spec, args, kwargs)
        answering = dispatch.answering_ranks(self.topology, spec, dispatched.ranks)
        packed = PackedArguments(self.scheduler, f"{self.name}.{spec.name}", dispatched)
        ids = {rank: f"{self.name}/{rank}" for rank in dispatched.ranks}
        answers, rest = {**_EXACTLY, "keep": options.keep}, {**_EXACTLY, "discard": True}
        wanted = set(answering)
        calls = {
            worker_id: packed.call_of(rank, answers if rank in wanted else rest)
            for rank, worker_id in ids.items()
        }
        is_cut = spec.sharding is not None
        futures = RankFutures([ids[rank] for rank in answering])

        async def run() -> list[Any]:
            try:
                limit_s = await self._order.enter(
                    spec.name, options.timeout, deadline, is_cut=is_cut
                )
                async with self._order.slot(limit_s, deadline) as left_s:
                    found = await self._call_workers(spec.name, calls, left_s, futures.follow)
                    results = dict(zip(ids, found, strict=True))
            finally:
                packed.release()
            return [results[rank] for rank in answering]

        def collect(results: list[Any]) -> Any:
            if not options.keep:
                return dispatch.collect(self.topology, spec, dispatched.cut, results)
            try:
                return dispatch.collect_kept(
                    self.scheduler, self.topology, spec, dispatched.cut, results
                )
            except BaseException:
                for handle in results:  # nothing else refers to them
                    if isinstance(handle, ResultHandle):
                        self.scheduler.release(handle)
                raise

        sent = submit(run())
        return GroupFuture(sent, collect, forbid_blocking, lambda: futures.make(sent))

    # --- calls from other processes ---------------------------------------------------------------

    def handle(self, *, address: str | None = None) -> ClusterHandle[W_co]:
        """Return a handle that other processes can call; it can be pickled.

        Pickling the cluster itself gives one, too. A process with a handle can call every method of
        the workers, until the cluster is closed.

        Args:
            address: Address of this machine at which those processes reach it. When None, its
                address among the scheduler's nodes when the ResourceManager was made. If it is the
                only node, only processes of this machine can connect, and large values pass through
                shared memory. The first call decides for all.

        Raises:
            HelmsmanError: None of the nodes is this machine, so that ``address`` is needed.
            OSError: The controller cannot listen there.
        """
        self._check_started()
        with self._making_desk:
            if self._desk is None:
                self._desk = ClusterDesk(
                    self, address or address_for_others(self.resource_manager.addresses)
                )
        return ClusterHandle(self.name, self.topology, self._desk.address)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.handle().__reduce__()

    def _after_death(self) -> str:
        return "Cluster.restart(rank) gives a rank a new process and a new instance of the class."

    # --- lifecycle --------------------------------------------------------------------------------

    def health(self) -> list[WorkerStatus]:
        """Report the status of each rank, in rank order.

        It answers during a long call, too, and includes workers that have died instead of raising.
        """
        self._check_started()
        found = {status.worker_id: status for status in self.scheduler.status()}
        return [found.get(worker.id, _deleted(worker)) for worker in self.workers]

    def restart(self, rank: int) -> None:
        """Replace the process of a rank, on the same devices, and rebuild its instance.

        The rank's state is lost, and process groups that it was in must be created again. A new
        rank 0 has another master port, which is set in the environment of all live ranks.
        Concurrent restarts of one cluster are serialized.

        Args:
            rank: Rank to restart.

        Raises:
            IndexError: The group has no such rank.
            StartError: The process could not start; the restart may be retried.
            EngineCreationError: The instance could not be built; the restart may be retried.
        """
        self.get_rank_info(rank)
        scheduler = self.scheduler

        async def rebuild(workers: Sequence[Worker]) -> None:
            await self._make_ready(workers, [rank])
            if rank == 0 and not scheduler.shares_process:
                for worker_id, environment in rank_environment(self.role, workers).items():
                    with contextlib.suppress(WorkerFailedError):
                        # a dead worker gets the variables when it is restarted
                        await scheduler.set_worker_env(worker_id, environment)

        with self._restarting:
            self.scheduler.restart_worker(self.workers[rank].id)
            self._workers = tuple(self.scheduler.get_workers(self.role, timeout=0))
            run_sync(rebuild(self._workers))

    def close(self) -> None:
        """Destroy the instances, end the workers and return their devices. Idempotent."""
        was_closed = self._closed
        if not was_closed:
            forbid_blocking()  # before its devices are freed
            if self._desk is not None:
                self._desk.close()
        try:
            super().close()
        finally:
            if not was_closed:  # else another cluster may use the name now
                self.resource_manager.free(self.name)

    def _engine_of(self, rank: int, workers: Sequence[Worker]) -> EngineSpec:
        environment = (
            {}
            if self.scheduler.shares_process
            else rank_environment(self.role, workers)[workers[rank].id]
        )
        if environment:
            environment |= {"CLUSTER_NAME": self.name, "WORKER_NAME": f"{self.name}-{rank}"}
        return EngineSpec(
            target=self._engine,
            env=environment,
            rank_info=self.get_rank_info(rank),
            kwargs=self._kwargs,
        )


def _deleted(worker: Worker) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker.id, state=WorkerState.STOPPED, node=worker.ip, pid=None, log_path=""
    )


# --- building the job -----------------------------------------------------------------------------


def _job_of(
    name: str, resources: ResourceManager, config: ClusterConfig, allocation: Allocation
) -> Job:
    """Build the job of a cluster's workers; rank 0 gets a port for the rendezvous."""
    spec = SchedulingSpec(cpu=config.num_cpus, env_vars=config.env_vars)
    if not resources.scheduler.shares_process and config.device_mapping is not None:
        mapping = [
            [device.index for device in worker.devices if device.node_rank == worker.node_rank]
            for worker in allocation.workers
        ]
        strategy = SchedulingStrategy(
            type="colocation", target=resources.name, fork=True, device_mapping=mapping
        )
        tasks = [spec] * len(allocation.workers)
    else:
        strategy = SchedulingStrategy()
        tasks = [
            msgspec.structs.replace(spec, mem=config.mem, nodelist=[worker.node_id])
            for worker in allocation.workers
        ]
    tasks[0] = msgspec.structs.replace(tasks[0], port_count=1)
    return Job(role=name, replicas=len(tasks), tasks=tasks, scheduling_strategy=strategy)


def _plain_class(worker_cls: Any) -> str | type[Any]:
    """Return the user's class, unwrapped if ``ray.remote`` has wrapped it."""
    metadata = getattr(worker_cls, "__ray_metadata__", None)
    if metadata is not None:
        # Ray's subclass would be pickled by value; this is the class of the user behind it.
        made: type[Any] = metadata.modified_class
        return getattr(made, "__ray_actor_class__", made)
    if not isinstance(worker_cls, (str, type)):
        raise TypeError(
            "worker_cls is a class, a Ray actor class or an import path; got "
            f"{type(worker_cls).__qualname__}"
        )
    return worker_cls
