"""From the configuration of a worker group to its size, its job and its class. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from helmsman.api.errors import InvalidSpecError
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._worker_groups.resource_manager import Allocation, ResourceManager, parse_device_mapping


def world_size_of(name: str, config: ClusterConfig) -> int:
    """Number of workers. Raises: InvalidSpecError."""

    def refuse(field: str, expected: str) -> InvalidSpecError:
        return InvalidSpecError(role=name, field=field, value=getattr(config, field), expected=expected)

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
        raise refuse("world_size", f"{size}, which {devices} devices with {each} for each worker give, or None")
    return size


def job_of(name: str, resources: ResourceManager, config: ClusterConfig, allocation: Allocation) -> Job:
    """The workers as the scheduler starts them. Rank 0 has a port, where process groups meet."""
    spec = SchedulingSpec(cpu=config.num_cpus, env_vars=config.env_vars)
    if not resources.scheduler.shares_process and config.device_mapping is not None:
        mapping = [[device.index for device in worker.devices] for worker in allocation.workers]
        strategy = SchedulingStrategy(type="colocation", target=resources.name, fork=True, device_mapping=mapping)
        tasks = [spec] * len(allocation.workers)
    else:
        strategy = SchedulingStrategy()
        tasks = [msgspec.structs.replace(spec, mem=config.mem, nodelist=[worker.node_id]) for worker in allocation.workers]
    tasks[0] = msgspec.structs.replace(tasks[0], port_count=1)
    return Job(role=name, replicas=len(tasks), tasks=tasks, scheduling_strategy=strategy)


def plain_class(worker_cls: Any) -> str | type[Any]:
    """The class itself, also of what ``ray.remote`` made of it."""
    metadata = getattr(worker_cls, "__ray_metadata__", None)
    if metadata is not None:
        # Ray's own subclass of it would be sent by value; the user's class is behind it.
        made: type[Any] = metadata.modified_class
        return getattr(made, "__ray_actor_class__", made)
    if not isinstance(worker_cls, (str, type)):
        raise TypeError(f"worker_cls is a class, a Ray actor class or an import path; got {type(worker_cls).__qualname__}")
    return worker_cls
