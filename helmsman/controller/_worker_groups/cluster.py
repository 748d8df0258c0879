"""Cluster: the workers of one role as a group, whose methods run on its ranks."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from helmsman.api.dispatch import CustomDispatch, MethodSpec
from helmsman.api.errors import DispatchError, InvalidSpecError, WorkerFailedError
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
from helmsman.api.topology import RankInfo
from helmsman.api.worker_group import (
    ClusterConfig,
    GroupFuture,
    Options,
    RegisteredMethod,
    WorkerGroup,
)
from helmsman.controller._aio.event_loop import forbid_blocking, run_sync, submit
from helmsman.controller._roles.role_controller import RoleController, rank_environment
from helmsman.controller._validation.argument_names import require_engine_arguments
from helmsman.controller._validation.argument_types import checked, require_seconds
from helmsman.controller._worker_groups import dispatch
from helmsman.controller._worker_groups.call_order import (
    CallOrder,
    PackedArguments,
    compare_coordinates,
)
from helmsman.controller._worker_groups.dispatch import Dispatched
from helmsman.controller._worker_groups.resource_manager import (
    Allocation,
    Device,
    ResourceManager,
    parse_device_mapping,
)

W_co = TypeVar("W_co", covariant=True)
Method: TypeAlias = str | RegisteredMethod[Any, ..., Any, Any]
"""The name of a method, or a declared one."""

_EXACTLY = {"broadcast": False}
"""Each rank is given what its coordinates say; nothing is passed on between workers."""
_OF_INSTANCES = (
    "name",
    "resource_manager",
    "worker_config",
    "topology",
    "scheduler",
    "job",
    "engine_name",
)
"""Attributes that a cluster has once it is made."""


class Cluster(RoleController, WorkerGroup[W_co]):
    """A named group of workers of one class, on devices of a ResourceManager, on any scheduler.

    It starts when it is made, or nothing of it remains. Methods that the class declares with
    ``register`` are called by ``cluster.method(Actor.log_probs)(batch)``, or as methods of the
    cluster where a subclass names them::

        class ActorCluster(Cluster[Actor]):
            log_probs = Actor.log_probs

    Before the first call that is cut along an axis, workers that have a method ``get_rank_info()``
    are asked once for their own coordinates, a RankInfo or a mapping of some of its fields;
    TopologyMismatchError names those that differ.

    Undeclared ones are called by name: ``execute_all_sync("log_probs", Shard(batch), 0.7)``. There,
    too, nothing is cut that is not marked as a Shard.
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
                    reason=f"a Cluster has a {name!r} of its own, which {value.spec.full_name} "
                    "would hide",
                    step="Name it otherwise here, or leave it out and call "
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
        """Start the workers and build an instance of the class in each.

        Args:
            name: role of the workers, which are 'name/0', 'name/1', ...
            worker_cls: a class, a Ray actor class, or an import path 'package.module.Class'.
            resource_manager: whose devices, nodes and scheduler they use.
            worker_config: how many, where, and their parallel sizes.
            args, kwargs: of the class's constructor, the same on every rank.
        Raises: JobError, StartError, EngineCreationError and its like; GroupCallError where several
            ranks failed.
        """
        self.name = name
        self.resource_manager = resource_manager
        self.worker_config = worker_config
        engine = _plain_class(worker_cls)
        require_engine_arguments(name, engine, kwargs or {})
        world_size = _world_size_of(name, worker_config)
        self.topology = worker_config.topology(name, world_size)
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
        try:
            job = _job_of(name, resource_manager, worker_config, self._allocation)
            super().__init__(resource_manager.scheduler, engine, job, args)
            self.initialize()
        except BaseException:
            resource_manager.free(name)
            raise

    # --- what it is -------------------------------------------------------------------------------

    @checked
    def get_rank_info(self, rank: int) -> RankInfo:
        """The coordinates of a rank, as the controller has computed them. Raises: IndexError."""
        return self.topology.get_rank_info(rank)

    @property
    def rank_to_worker(self) -> dict[int, Worker]:
        """The worker of each rank."""
        return dict(enumerate(self.workers))

    @property
    def worker_to_rank(self) -> dict[str, int]:
        """The rank of each worker, by its id."""
        return {worker.id: rank for rank, worker in enumerate(self.workers)}

    @property
    def rank_to_devices(self) -> dict[int, tuple[Device, ...]]:
        """The devices of each rank; none for workers without."""
        return {worker.rank: worker.devices for worker in self._allocation.workers}

    @property
    def rank_to_node(self) -> dict[int, int]:
        """The number of each rank's node in the ResourceManager."""
        return {worker.rank: worker.node_rank for worker in self._allocation.workers}

    @property
    def colocated_with(self) -> tuple[str, ...]:
        """Clusters that had one of its devices before it."""
        return self._allocation.colocated_with

    @property
    def master_address(self) -> str:
        """Address of rank 0's node, where a process group of the ranks meets."""
        return self.workers[0].ip

    @property
    def master_port(self) -> int:
        """A port there that is leased to rank 0."""
        return int(self.workers[0].engine_ports[0])

    def table(self) -> str:
        """A line for each rank: worker, node, devices, coordinates."""
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

    # --- calls by name ----------------------------------------------------------------------------

    def execute_rank_zero_sync(
        self, method: Method, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a method on rank 0 alone and return what it returns. Raises: its error."""
        return self.execute_rank_zero_async(method, *args, timeout=timeout, **kwargs).awaited()

    def execute_rank_zero_async(
        self, method: Method, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> GroupFuture[Any]:
        """As execute_rank_zero_sync, without waiting."""
        return self._execute(method, [0], args, kwargs, timeout, lambda results: results[0])

    def execute_all_sync(
        self, method: Method, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method on all ranks and return what each returns, in rank order.

        Args:
            method: its name, or a declared one, whose declaration is not used here.
            args, kwargs: given to every rank as they are, also lists; ``Shard(x)`` is cut.
            timeout: seconds for all ranks together; the scheduler's ``timeouts.call_s`` when None.
        Raises: DispatchError and UnevenBatchError before anything is sent; GroupCallError, root
            cause first.
        """
        return self.execute_all_async(method, *args, timeout=timeout, **kwargs).awaited()

    def execute_all_async(
        self, method: Method, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> GroupFuture[list[Any]]:
        """As execute_all_sync, without waiting."""
        return self._execute(method, range(self.world_size), args, kwargs, timeout, list)

    @checked
    def execute_on(
        self,
        ranks: Sequence[int],
        method: Method,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """As execute_all_sync on these ranks, in their order. A Shard is cut over all ranks, and
        theirs are sent.
        """
        ranks = [self.get_rank_info(operator.index(rank)).rank for rank in ranks]
        if not ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"ranks are {ranks}; give one at least, and each once")
        results: list[Any] = self._execute(method, ranks, args, kwargs, timeout, list).awaited()
        return results

    def _execute(
        self,
        method: Method,
        ranks: Sequence[int],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        collect: Callable[[list[Any]], Any],
    ) -> GroupFuture[Any]:
        self._check_started()
        name = method if isinstance(method, str) else self.method(method).spec.name
        dispatched = dispatch.dispatch_ad_hoc(
            self.topology, f"{self.name}.{name}", args, kwargs, ranks
        )
        return GroupFuture(
            self._send(name, dispatched, ranks, Options(timeout)), collect, forbid_blocking
        )

    # --- declared calls ---------------------------------------------------------------------------

    def _begin(
        self, spec: MethodSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options
    ) -> GroupFuture[Any]:
        self._check_started()
        if options.keep and (
            isinstance(spec.dispatch_mode, CustomDispatch) or callable(spec.collect)
        ):
            raise DispatchError(
                method=spec.full_name,
                reason="its results are to stay in the workers, and a function of its own is to "
                "make one of them",
                step="Call it without keep, or declare Collect.LIST and call the function where "
                "the values are",
            )
        dispatched = dispatch.dispatch(self.topology, spec, args, kwargs)
        answering = dispatch.answering_ranks(self.topology, spec, dispatched.ranks)

        def collect(results: list[Any]) -> Any:
            if not options.keep:
                return dispatch.collect(self.topology, spec, dispatched.cut, results)
            try:
                return dispatch.collect_kept(
                    self.scheduler, self.topology, spec, dispatched.cut, results
                )
            except BaseException:
                for handle in results:  # nobody else knows them
                    if isinstance(handle, ResultHandle):
                        self.scheduler.release(handle)
                raise

        sent = self._send(
            spec.name, dispatched, answering, options, is_cut=spec.sharding is not None
        )
        return GroupFuture(sent, collect, forbid_blocking)

    def _send(
        self,
        method: str,
        dispatched: Dispatched,
        answering: Sequence[int],
        options: Options,
        *,
        is_cut: bool = False,
    ) -> Any:
        """Start the call without blocking; a future of the results of ``answering``, in their
        order.

        Arguments are packed here, in the caller's thread. A call that ``is_cut`` along an axis is
        preceded by the check of the workers' coordinates, on Helmsman's event loop.
        """
        require_seconds(f"{self.name}.{method}", options.timeout)
        deadline = time.monotonic() + (
            self.scheduler.timeouts.call_s if options.timeout is None else options.timeout
        )
        packed = PackedArguments(self.scheduler, f"{self.name}.{method}", dispatched)
        wanted = set(answering)
        ids = {rank: f"{self.name}/{rank}" for rank in dispatched.ranks}
        answers, rest = {**_EXACTLY, "keep": options.keep}, {**_EXACTLY, "discard": True}
        calls = {
            worker_id: packed.call_of(rank, answers if rank in wanted else rest)
            for rank, worker_id in ids.items()
        }

        async def run() -> list[Any]:
            try:
                limit_s = await self._order.enter(method, options.timeout, deadline, is_cut=is_cut)
                async with self._order.slot(limit_s, deadline) as left_s:
                    results = dict(
                        zip(ids, await self._call_workers(method, calls, left_s), strict=True)
                    )
            finally:
                packed.release()
            return [results[rank] for rank in answering]

        return submit(run())

    def _after_death(self) -> str:
        return "Cluster.restart(rank) gives a rank a new process and a new instance of the class."

    # --- life -------------------------------------------------------------------------------------

    def health(self) -> list[WorkerStatus]:
        """What each rank is doing, in rank order; also during a long call. Never raises for a dead
        one.
        """
        self._check_started()
        found = {status.worker_id: status for status in self.scheduler.status()}
        return [found.get(worker.id, _deleted(worker)) for worker in self.workers]

    @checked
    def restart(self, rank: int) -> None:
        """Give a rank a new process, on the same devices, with a new instance of the class.

        Its state is gone, and process groups that it was in have to be made again. A new rank 0 has
        another master port, of which the environment of all ranks that live is told. Restarts of
        one cluster wait for each other.

        Raises: IndexError; StartError and EngineCreationError, after which it may be tried again.
        """
        self.get_rank_info(rank)
        scheduler = self.scheduler

        async def rebuild(workers: Sequence[Worker]) -> None:
            await self._make_ready(workers, [rank])
            if rank == 0 and not scheduler.shares_process:
                for worker_id, environment in rank_environment(self.role, workers).items():
                    with contextlib.suppress(WorkerFailedError):
                        # a dead one is told when it is restarted
                        await scheduler.set_worker_env(worker_id, environment)

        with self._restarting:
            self.scheduler.restart_worker(self.workers[rank].id)
            self._workers = tuple(self.scheduler.get_workers(self.role, timeout=0))
            run_sync(rebuild(self._workers))

    def shutdown(self) -> None:
        """As close."""
        self.close()

    def close(self) -> None:
        """Destroy the instances, end the workers and give their devices back to the
        ResourceManager. Idempotent.
        """
        was_closed = self._closed
        if not was_closed:
            forbid_blocking()  # before its devices are given back
        try:
            super().close()
        finally:
            if not was_closed:  # else another may have the name now
                self.resource_manager.free(self.name)

    def _engine_of(self, rank: int, workers: Sequence[Worker]) -> EngineSpec:
        environment = (
            {}
            if self.scheduler.shares_process
            else rank_environment(self.role, workers)[workers[rank].id]
        )
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


# --- from the configuration to the job ------------------------------------------------------------


def _world_size_of(name: str, config: ClusterConfig) -> int:
    def refuse(field: str, expected: str) -> InvalidSpecError:
        return InvalidSpecError(
            role=name, field=field, value=getattr(config, field), expected=expected
        )

    if config.max_concurrency is not None and config.max_concurrency < 1:
        raise refuse("max_concurrency", "1 or more, or None for no limit")
    if config.device_mapping is None:
        if config.world_size is None:
            raise refuse("world_size", "a number of workers, or a device_mapping that gives it")
        return config.world_size
    devices = len(parse_device_mapping(config.device_mapping, name))
    size, rest = divmod(devices, max(1, config.num_gpus_per_worker))
    if config.num_gpus_per_worker < 1 or rest:
        raise refuse("num_gpus_per_worker", f"a divisor of the {devices} devices of device_mapping")
    if config.world_size not in (None, size):
        each = config.num_gpus_per_worker
        raise refuse(
            "world_size",
            f"{size}, which {devices} devices with {each} for each worker give, or None",
        )
    return size


def _job_of(
    name: str, resources: ResourceManager, config: ClusterConfig, allocation: Allocation
) -> Job:
    """The workers as the scheduler starts them. Rank 0 has a port, where process groups meet."""
    spec = SchedulingSpec(cpu=config.num_cpus, env_vars=config.env_vars)
    if not resources.scheduler.shares_process and config.device_mapping is not None:
        mapping = [[device.index for device in worker.devices] for worker in allocation.workers]
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
    """The class itself, also of what ``ray.remote`` made of it."""
    metadata = getattr(worker_cls, "__ray_metadata__", None)
    if metadata is not None:
        # Ray's own subclass of it would be sent by value; the user's class is behind it.
        made: type[Any] = metadata.modified_class
        return getattr(made, "__ray_actor_class__", made)
    if not isinstance(worker_cls, (str, type)):
        raise TypeError(
            "worker_cls is a class, a Ray actor class or an import path; got "
            f"{type(worker_cls).__qualname__}"
        )
    return worker_cls
