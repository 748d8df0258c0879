"""ROLL's clusters on Helmsman's schedulers: its Cluster, Worker, register and dispatch rules.

A script imports these names in place of ROLL's. Methods that split rows take and return a list, or
an object with ``chunk(n)`` and ``concat(parts)``: a Batch, ROLL's DataProto, or that of
``helmsman.compat.roll_data``. A worker sets its coordinates as ``rank_info``. ``cluster.helmsman``
is the Cluster behind it. A cluster that is pickled calls the same workers from another process.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import pkgutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from helmsman.api.batch import Batch
from helmsman.api.dispatch import MethodSpec
from helmsman.api.platforms import current_platform
from helmsman.api.worker_group import GroupFuture, GroupMethod
from helmsman.api.workers import worker_context
from helmsman.worker_groups import Cluster as _Cluster
from helmsman.worker_groups import ClusterConfig, GroupWorker
from helmsman.worker_groups import Dispatch as Dispatch
from helmsman.worker_groups import Execute as Execute
from helmsman.worker_groups import ResourceManager as ResourceManager

BIND_WORKER_METHOD_FLAG = "BIND_WORKER_METHOD_FLAG"

Mode: TypeAlias = Dispatch | Mapping[str, Callable[..., Any]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class RankInfo:
    """Coordinates of a rank, as its worker sets them."""

    world_size: int = 1
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    rank: int = 0
    tp_rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0
    cp_rank: int = 0

    @property
    def is_pipeline_last_stage(self) -> bool:
        """Whether it is of the last pipeline stage."""
        return self.pp_rank == self.pp_size - 1


class ObjectRefWrap(NamedTuple):
    """The pending result of one rank, and whether it is part of the call's."""

    obj_ref: GroupFuture[Any]
    collected: bool


def get(references: Any, timeout: float | None = None) -> Any:
    """Return the result of a pending one, or those of a list that are collected."""
    if isinstance(references, list):
        pairs = [(get(each, timeout), getattr(each, "collected", True)) for each in references]
        return [result for result, counts in pairs if counts]
    return getattr(references, "obj_ref", references).result(timeout)


def register(
    dispatch_mode: Mode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    clear_cache: bool = True,
    **ignored: bool,
) -> Callable[[F], F]:
    """Return a decorator for a worker's method, which its cluster then has, too.

    Args:
        dispatch_mode: How arguments reach the ranks, or {"dispatch_fn": ..., "collect_fn": ...},
            called with the cluster first.
        execute_mode: All ranks, or rank 0 alone.
        clear_cache: Whether to return cached device memory after each call; not for ``async def``.
        ignored: ROLL's options for tracing and remote batches, without effect.
    """

    def declare(function: F) -> F:
        called: Any = function
        if clear_cache and not inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            def called(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                if "torch" in sys.modules and current_platform.name != "cpu":
                    current_platform.empty_cache()
                return result

        modes = {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode}
        setattr(called, BIND_WORKER_METHOD_FLAG, modes)
        return called  # type: ignore[no-any-return]

    return declare


class Worker(GroupWorker):
    """Base class of workers; ``worker_config`` is the configuration of its cluster."""

    rank_info: Any

    def __init__(self, worker_config: Any) -> None:
        context = worker_context()
        assert context is not None, "a Worker is made by its Cluster"
        self.worker_config = worker_config
        self.cluster_name, _, number = context.worker_id.rpartition("/")
        self.worker_name = f"{self.cluster_name}-{number}"
        self.rank, self.world_size = rank, size = self.rank_info.rank, self.rank_info.world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.master_addr = os.environ.get("MASTER_ADDR", context.node)
        self.master_port = int(os.environ.get("MASTER_PORT", 0))
        self.rank_info = RankInfo(world_size=size, dp_size=size, rank=rank, dp_rank=rank)
        self._node = context.node

    def get_rank_info(self) -> Any:
        """Return its coordinates."""
        return self.rank_info

    def get_node_ip(self) -> str:
        """Return the address of its node."""
        return self._node

    @staticmethod
    def get_free_port() -> int:
        """Return a port that was free a moment ago."""
        with socket.socket() as free:
            free.bind(("", 0))
            return int(free.getsockname()[1])


class Cluster:
    """The workers of one role, with the methods that their class declares.

    Each method takes ``blocking=False`` to return the ranks' pending results at once.

    Args:
        name: Role of the workers.
        worker_cls: A class, a Ray actor class, or an import path.
        resource_manager: Holds the devices.
        worker_config: ROLL's WorkerConfig, or a ClusterConfig; each worker's constructor gets it.
    """

    def __init__(
        self, name: str, worker_cls: Any, resource_manager: ResourceManager, worker_config: Any
    ) -> None:
        if isinstance(worker_cls, str):
            worker_cls = pkgutil.resolve_name(worker_cls)
        config = worker_config
        if not isinstance(config, ClusterConfig):
            mapping = worker_config.device_mapping or None
            strategy = getattr(worker_config, "strategy_args", None)
            more = getattr(strategy, "strategy_config", None) or {}
            config = ClusterConfig(
                device_mapping=mapping,
                num_gpus_per_worker=worker_config.num_gpus_per_worker if mapping else 1,
                world_size=None if mapping else worker_config.world_size,
                num_cpus=1 if mapping else 0.01,  # as ROLL does
                env_vars={key: str(value) for key, value in worker_config.system_envs.items()},
                vp_size=more.get("virtual_pipeline_model_parallel_size", 1),
            )
        self.cluster_name = name
        self.worker_config = worker_config
        self.vp_size = config.vp_size
        self.initialized = False
        self._rank_infos: list[Any] = []
        self.resource_manager: ResourceManager | None = resource_manager
        self.helmsman: Any = _Cluster(
            name, worker_cls, resource_manager, config, kwargs={"worker_config": worker_config}
        )
        self.world_size: int = self.helmsman.world_size
        self.workers = [WorkerProxy(self.helmsman, rank) for rank in range(self.world_size)]
        self.master_addr, self.master_port = self.helmsman.master_address, self.helmsman.master_port
        self.rank2devices = {
            rank: [
                {"rank": at, "node_rank": each.node_rank, "gpu_rank": each.device_rank}
                for at, each in enumerate(devices)
            ]
            for rank, devices in self.helmsman.rank_to_devices.items()
        }
        of_ray = getattr(worker_cls, "__ray_metadata__", None)
        for method, function in inspect.getmembers(getattr(of_ray, "modified_class", worker_cls)):
            if declared := getattr(function, BIND_WORKER_METHOD_FLAG, None):
                setattr(self, method, functools.partial(self._call, method, declared))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "resource_manager": None}

    @property
    def worker_rank_info(self) -> list[Any]:
        """Coordinates of all ranks, which are asked until the cluster is initialized."""
        if not self._rank_infos or not self.initialized:
            self._rank_infos = self.helmsman.execute_all_sync("get_rank_info")
        return self._rank_infos

    def get_rank_info(self, rank: int) -> Any:
        """Return the coordinates of a rank."""
        return self.worker_rank_info[rank]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "helmsman":
            raise AttributeError(name)
        if name in ("dp_size", "tp_size", "pp_size", "cp_size"):
            return getattr(self.worker_rank_info[0], name)
        return getattr(self.helmsman, name)

    def _call(
        self, method: str, modes: Any, /, *args: Any, blocking: bool = True, **kwargs: Any
    ) -> Any:
        mode: Mode = modes["dispatch_mode"]
        if method == "initialize":  # It sets the coordinates for good.
            self.initialized, self._rank_infos = True, []
        ranks: Any = self
        if mode in _CUT:  # asked once, and before the call, which would delay the answer
            infos = self.worker_rank_info
            ranks = SimpleNamespace(
                world_size=len(infos), dp_size=infos[0].dp_size, get_rank_info=infos.__getitem__
            )
        args, kwargs = _dispatched(mode, ranks, *args, **kwargs)
        if modes["execute_mode"] is Execute.RANK_ZERO:
            first = {name: value[0] for name, value in kwargs.items()}
            call = self.helmsman.execute_rank_zero_async
            pending = call(method, *(each[0] for each in args), **first)
            return pending.awaited() if blocking else pending
        future = self._each_its_own(method, args, kwargs)
        if blocking:
            return _collected(mode, ranks, future.awaited())
        if mode in (*_JOINED, Dispatch.ONE_TO_ALL_ONE):
            return list(map(ObjectRefWrap, future, _counts(mode, ranks)))
        return list(future)

    def _each_its_own(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> GroupFuture[Any]:
        spec = MethodSpec(name=method, owner=self.cluster_name, dispatch_mode=Dispatch.ALL_TO_ALL)
        return GroupMethod[..., Any](self.helmsman, spec).submit(*args, **kwargs)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call all ranks; if every argument is a list as long as the ranks, each gets its entry."""
        values, size = [*args, *kwargs.values()], self.world_size
        if not all(isinstance(each, list) and len(each) == size for each in values):
            args, kwargs = dispatch_one_to_all(self, *args, **kwargs)
        return list(self._each_its_own(method_name, args, kwargs))

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call all ranks in the same way, and return their results."""
        return get(self.execute_all_async(method_name, *args, **kwargs))

    execute_all = execute_all_async

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call rank 0, and return its pending result."""
        return self.helmsman.execute_rank_zero_async(method_name, *args, **kwargs)


class WorkerProxy:
    """One worker: ``proxy.method.remote(...)`` calls it, and returns its pending result."""

    def __init__(self, cluster: Any, rank: int) -> None:
        self._cluster, self.rank = cluster, rank

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def remote(*args: Any, **kwargs: Any) -> Any:
            (future,) = self._cluster.execute_on_async([self.rank], name, *args, **kwargs)
            return future

        return SimpleNamespace(remote=remote)


# --- dispatch -------------------------------------------------------------------------------------

_JOINED = (Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST)
_CUT = (*_JOINED, Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL)


def _dispatched(mode: Mode, cluster: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the arguments with a value for each rank."""
    if isinstance(mode, Mapping):
        return mode["dispatch_fn"](cluster, *args, **kwargs)
    if mode is Dispatch.ALL_TO_ALL:
        return args, kwargs
    shares = functools.partial(_shares, mode, cluster)
    return tuple(map(shares, args)), {name: shares(value) for name, value in kwargs.items()}


def _shares(mode: Dispatch, cluster: Any, value: Any) -> list[Any]:
    if mode not in _CUT:
        return [value] * cluster.world_size
    num_parts, shares = cluster.dp_size, []
    if isinstance(value, (list, tuple)):
        size, rest = divmod(len(value), num_parts)
        if rest:
            raise ValueError(f"{len(value)} rows do not divide over {num_parts} dp ranks")
        parts: Sequence[Any] = [value[size * k : size * (k + 1)] for k in range(num_parts)]
    else:
        parts = value.chunk(num_parts)
    for info in map(cluster.get_rank_info, range(cluster.world_size)):
        part = parts[info.dp_rank]
        if mode is not Dispatch.DP_MP_COMPUTE and (info.tp_rank or info.cp_rank or info.pp_rank):
            if isinstance(part, Batch):
                part = Batch({}, part.meta)
            elif hasattr(part, "meta_info"):
                part = type(part)(batch=None, meta_info=part.meta_info)
        shares.append(part)
    return shares


def _counts(mode: Mode, cluster: Any) -> list[bool]:
    """Return whether the result of each rank is part of the call's."""
    if mode is Dispatch.ONE_TO_ALL_ONE:
        return [rank == 0 for rank in range(cluster.world_size)]
    return [
        not info.tp_rank and not info.cp_rank and info.is_pipeline_last_stage
        for info in map(cluster.get_rank_info, range(cluster.world_size))
    ]


def _collected(mode: Mode, cluster: Any, results: list[Any]) -> Any:
    if isinstance(mode, Mapping):
        return mode["collect_fn"](cluster, results)
    if mode is Dispatch.ONE_TO_ALL_ONE:
        return results[0]
    if mode not in _JOINED:
        return results
    parts = list(itertools.compress(results, _counts(mode, cluster)))
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    if hasattr(parts[0], "concat"):
        return type(parts[0]).concat(parts)
    raise ValueError(
        "a method that splits rows must return rows: a list, or an object with chunk and concat; "
        f"got {type(parts[0]).__name__}"
    )


_of = functools.partial
# ``dispatch_fn(cluster, *args, **kwargs)`` and ``collect_fn(cluster, results)`` of the modes, for
# dispatch modes of a script's own.
dispatch_one_to_all = _of(_dispatched, Dispatch.ONE_TO_ALL)
dispatch_all_to_all = _of(_dispatched, Dispatch.ALL_TO_ALL)
dispatch_dp_mp_compute = _of(_dispatched, Dispatch.DP_MP_COMPUTE)
dispatch_dp_mp_dispatch_first = _of(_dispatched, Dispatch.DP_MP_DISPATCH_FIRST)
collect_all_to_all = _of(_collected, Dispatch.ALL_TO_ALL)
collect_all_to_one = _of(_collected, Dispatch.ONE_TO_ALL_ONE)
collect_dp_mp_compute = _of(_collected, Dispatch.DP_MP_COMPUTE)
