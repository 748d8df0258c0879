"""Starts match their plans and are atomic: all workers are ready, or nothing remains."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, Timeouts
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._groups.resource_manager import ResourceManager
from tests.contract.engines import Counter
from tests.contract.group_workers import Member
from tests.contract.groups import ON_CPU, Members
from tests.contract.helpers import Driver, Engine, alias_of, run_id, wait_gone, wait_until
from tests.contract.marks import needs_processes, only_local, only_ray, ray_smoke
from tests.processes import command_of

TOO_MANY_PORTS = 60_000


def _held_by_groups() -> dict[str, Any]:
    """Return Ray's placement groups that are not removed, by id."""
    from ray.util.placement_group import placement_group_table

    return {
        id_: table for id_, table in placement_group_table().items() if table["state"] != "REMOVED"
    }


def _free() -> dict[str, float]:
    import ray

    return {
        name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")
    }


@ray_smoke
def test_create_workers_failure_leaves_nothing(
    backend: str, scheduler: Scheduler, shared_workers: list[str], role: str
) -> None:
    """The second replica requests too many ports after all processes have started."""
    before = [status.worker_id for status in scheduler.status()]
    groups, free = (_held_by_groups(), _free()) if backend == "ray" else ({}, {})
    workers = _workers_of_this_machine()
    job = Job(
        role=role,
        replicas=2,
        tasks=[SchedulingSpec(gpu=0), SchedulingSpec(port_count=TOO_MANY_PORTS)],
    )
    with pytest.raises(errors.WorkerStartError) as caught:
        scheduler.create_workers(job)
    error = caught.value
    assert (error.role, error.worker_id) == (role, f"{role}/1")
    assert f"{TOO_MANY_PORTS} ports cannot be leased" in str(error)
    assert "All workers of the role were stopped" in str(error)
    assert [status.worker_id for status in scheduler.status()] == before
    wait_until(lambda: not (_workers_of_this_machine() - workers), "its processes have ended")
    if backend == "ray":
        wait_until(
            lambda: _held_by_groups().keys() == groups.keys(), "its placement group is removed"
        )
        wait_until(
            lambda: all(_free().get(name, 0) >= amount for name, amount in free.items()),
            "its resources are free",
        )
    assert scheduler.create_workers(Job(role=role)) == [f"{role}/0"], "the name is free"


def _workers_of_this_machine() -> set[int]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        name = command_of(process)
        # The fork server and its watcher stay until the scheduler is closed.
        if "ray::RayRPCServer" in name or re.search(r"helmsman: (?!forkserver|watcher)", name):
            found.add(process.pid)
    return found


@needs_processes
def test_create_workers_worker_ends(scheduler: Scheduler, role: str) -> None:
    """A worker cannot open its log, since a folder has that name."""
    log = scheduler.log_dir / f"{role}-1.log"
    log.mkdir()
    workers = _workers_of_this_machine()
    with pytest.raises(errors.WorkerStartError) as caught:
        scheduler.create_workers(Job(role=role, replicas=3))
    assert caught.value.worker_id == f"{role}/1"
    wait_until(lambda: not (_workers_of_this_machine() - workers), "the others have ended")
    log.rmdir()
    assert len(scheduler.create_workers(Job(role=role, replicas=3))) == 3


@ray_smoke
@needs_processes
def test_create_workers_one_deadline(backend: str, make_own: Callable[..., Scheduler]) -> None:
    options: dict[str, Any] = (
        {"preload": ["tests.contract.slow_module"]} if backend == "local" else {}
    )
    scheduler = make_own(timeouts=Timeouts(start_s=0.05), **options)
    workers = _workers_of_this_machine()
    with pytest.raises((errors.WorkerStartError, errors.PlacementTimeoutError)) as caught:
        scheduler.create_workers(Job(role="late", replicas=2))
    assert "Timeouts.start_s" in str(caught.value)
    assert scheduler.status() == []
    scheduler.close()
    wait_until(lambda: not (_workers_of_this_machine() - workers), "its processes have ended")


# --- insufficient resources -----------------------------------------------------------------------


@ray_smoke
@only_ray
def test_create_workers_unknown_accelerator(scheduler: Scheduler, role: str) -> None:
    groups = _held_by_groups()
    spec = SchedulingSpec(accelerator_type="H9000")
    with pytest.raises(errors.PlacementInfeasibleError) as caught:
        scheduler.create_workers(Job(role=role, tasks=[spec]))
    assert "accelerator_type:H9000" in caught.value.shortfall
    assert role in str(caught.value)
    assert _held_by_groups().keys() == groups.keys()


@ray_smoke
@needs_processes
def test_create_workers_names_own_holder(backend: str, scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(
        Job(role=f"{role}-holder", replicas=2, tasks=[SchedulingSpec(cpu=0, gpu=3)])
    )
    groups = _held_by_groups() if backend == "ray" else {}
    with pytest.raises(errors.PlacementTimeoutError) as caught:
        # Raises at once, since this run itself holds the devices.
        scheduler.create_workers(Job(role=role, replicas=3, tasks=[SchedulingSpec(cpu=0, gpu=1)]))
    assert f"{role}-holder" in caught.value.holders
    assert "2" in caught.value.free
    if backend == "ray":
        wait_until(lambda: _held_by_groups().keys() == groups.keys(), "its group is removed")
    scheduler.delete_workers(f"{role}-holder")
    job = Job(role=role, replicas=3, tasks=[SchedulingSpec(cpu=0, gpu=1)])
    assert len(scheduler.create_workers(job)) == 3


@ray_smoke
@only_ray
def test_create_workers_waits_for_others(
    make_own: Callable[..., Scheduler], scheduler: Scheduler, role: str
) -> None:
    other: Any = make_own(timeouts=Timeouts(start_s=0.5))
    with other:
        scheduler.create_workers(
            Job(role=f"{role}-holder", replicas=2, tasks=[SchedulingSpec(cpu=0, gpu=3)])
        )
        groups = _held_by_groups()
        with pytest.raises(errors.PlacementTimeoutError) as caught:
            other.create_workers(Job(role=role, replicas=3, tasks=[SchedulingSpec(cpu=0, gpu=1)]))
        assert caught.value.elapsed_s >= 0.5
        assert f"{role}-holder" in caught.value.holders
        wait_until(lambda: _held_by_groups().keys() == groups.keys(), "its group is removed")
        scheduler.delete_workers(f"{role}-holder")
        other.timeouts = Timeouts()  # Ray assigns free resources to a pending group in a second.
        job = Job(role=role, replicas=3, tasks=[SchedulingSpec(cpu=0, gpu=1)])
        assert len(other.create_workers(job)) == 3


# --- plans ----------------------------------------------------------------------------------------


def _jobs(role: str, gpu: int = 1) -> list[Job]:
    return [
        alias_of(role, f"{role}-beside"),
        Job(role=role, replicas=2, tasks=[SchedulingSpec(cpu=0, gpu=gpu, port_count=1)]),
        Job(role=f"{role}-cpu", tasks=[SchedulingSpec(cpu=0.5)]),
    ]


@ray_smoke
def test_plan_matches_start(scheduler: Scheduler, role: str) -> None:
    before = {status.worker_id for status in scheduler.status()}
    plan = scheduler.plan(_jobs(role))
    assert {status.worker_id for status in scheduler.status()} == before, "nothing was started"
    planned = [worker.worker_id for each in plan.roles for worker in each.workers]
    assert planned == [f"{role}-beside/0", f"{role}/0", f"{role}/1", f"{role}-cpu/0"]
    assert all(worker_id.rpartition("/")[0] in plan.table() for worker_id in planned)
    assert scheduler.create_workers(_jobs(role)) == planned
    assert [len(worker.devices) for worker in scheduler.get_workers(role)] == [1, 1]
    engines = [Engine.create(scheduler, worker_id, Counter) for worker_id in planned]
    assert [engine.call("add", 1) for engine in engines] == [1, 1, 1, 1]
    assert engines[0].call("pid") == engines[1].call("pid")
    scheduler.delete_workers(role)
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.get_workers(f"{role}-beside")


def test_plan_names_holder(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(cpu=0, gpu=6)]))
    with pytest.raises(errors.PlacementTimeoutError, match=f"{role}"):
        scheduler.plan(Job(role=f"{role}-more", tasks=[SchedulingSpec(cpu=0, gpu=3)]))


# --- devices --------------------------------------------------------------------------------------

MASKS = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@ray_smoke
@needs_processes
def test_devices_visible_to_worker(scheduler: Scheduler, role: str) -> None:
    assert scheduler.n_gpus_per_node == 8
    workers = scheduler.create_workers(
        Job(role=role, replicas=3, tasks=[SchedulingSpec(cpu=0, gpu=2)])
    )
    workers += scheduler.create_workers(Job(role=f"{role}-cpu", tasks=[SchedulingSpec(cpu=1)]))
    masks = [
        Engine.create(scheduler, worker, Counter).call("environ", *MASKS) for worker in workers
    ]
    granted = [mask["CUDA_VISIBLE_DEVICES"].split(",") for mask in masks[:3]]
    assert all(len(ids) == 2 for ids in granted)
    assert len({id_ for ids in granted for id_ in ids}) == 6, "each device has one worker"
    assert masks[3]["CUDA_VISIBLE_DEVICES"] == "", "a worker without devices sees none"
    assert {mask["ASCEND_RT_VISIBLE_DEVICES"] for mask in masks} == {""}


def test_resource_manager_destroy_frees_devices(scheduler: Scheduler, role: str) -> None:
    manager = ResourceManager(2, scheduler=scheduler, name=role)
    config = ClusterConfig(device_mapping="0-1", num_cpus=0.5, env_vars=ON_CPU)
    group = Members(f"{role}-group", Member, manager, config)
    manager.destroy_placement_group()
    manager.destroy_placement_group()
    group.close()
    wait_until(
        lambda: all(node.num_free_devices == node.num_devices for node in scheduler.nodes()),
        "all devices are free",
    )
    with pytest.raises(
        errors.HelmsmanError,
        match=f"'{role}' were released; create another ResourceManager for 'late'",
    ):
        manager.allocate_placement_group(1, holder="late")


@needs_processes
def test_devices_without_torch(backend: str, run_driver: Callable[..., Driver]) -> None:
    """The script's environment has a mask, and torch cannot be imported."""
    variable, options = {
        "ray": ("ASCEND_RT_VISIBLE_DEVICES", "num_gpus=0, resources={'NPU': 8}"),
        "local": ("CUDA_VISIBLE_DEVICES", "num_gpus=8, accelerator='cuda'"),
    }[backend]
    driver = run_driver(
        f"""
sys.modules["torch"] = None  # makes its import raise
with make({options}) as scheduler:
    scheduler.create_workers(Job(role="a", replicas=2, tasks=[SchedulingSpec(cpu=0, gpu=2)]))
    for index in range(2):
        asyncio.run(scheduler.create_engine(f"a/{{index}}", engines.Counter))
    seen = [
        scheduler.call_engine(f"a/{{index}}", "environ", None, {variable!r})
        for index in range(2)
    ]
    tell(seen=[each[{variable!r}] for each in seen], per_node=scheduler.n_gpus_per_node)
""",
        environment={variable: "0,1,2,3,4,5,6,7"},
    )
    facts = driver.facts()
    assert facts["per_node"] == 8
    assert len({id_ for mask in facts["seen"] for id_ in mask.split(",")}) == 4
    assert driver.wait() == 0, driver.errors()
    driver.wait_nothing_left()


# --- without Ray ----------------------------------------------------------------------------------

NO_RAY = """
import importlib.abc
class NoRay(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoRay())
"""


def test_make_scheduler_without_ray(backend: str, run_driver: Callable[..., Driver]) -> None:
    driver = run_driver(
        NO_RAY
        + """
try:
    with make() as scheduler:
        scheduler.create_workers(Job(role="a"))
        asyncio.run(scheduler.create_engine("a/0", engines.Counter))
        tell(sum=scheduler.call_engine("a/0", "add", None, 5), ray="ray" in sys.modules)
except errors.BackendNotInstalledError as error:
    tell(error=str(error))
"""
    )
    if backend == "ray":
        message = driver.facts()["error"]
        assert "RayScheduler needs the package 'ray'" in message
        assert "pip install 'helmsman-rl[ray]'" in message
    else:
        assert driver.facts() == {"sum": 5, "ray": False}
    assert driver.wait() == 0
    driver.wait_nothing_left()


# --- the forkserver of local workers --------------------------------------------------------------


@only_local
def test_driver_with_many_descriptors(make_own: Callable[..., Scheduler]) -> None:
    """New descriptors of the script have numbers that ``select`` does not take."""
    with contextlib.ExitStack() as held:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4_096), hard))
        while held.enter_context(open(os.devnull)).fileno() < 1_100:
            pass
        with make_own() as scheduler:
            assert len(scheduler.create_workers(Job(role="a"))) == 1


@only_local
def test_local_forkserver_dies(make_own: Callable[..., Scheduler]) -> None:
    with make_own() as scheduler:
        (worker,) = scheduler.create_workers(Job(role="a"))
        pid = Engine.create(scheduler, worker, Counter).call("pid")
        os.kill(psutil.Process(pid).ppid(), 9)
        wait_gone({"worker": pid})
        with pytest.raises(errors.WorkerFailedError):
            scheduler.call_engine(worker, "add", rpc_timeout=10)
        scheduler.delete_workers()
        (worker,) = scheduler.create_workers(Job(role="a"))
        assert Engine.create(scheduler, worker, Counter).call("add") == 1


@only_local
def test_local_long_temporary_folder(
    make_own: Callable[..., Scheduler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's TMPDIR may be longer than the 107 bytes of a Unix socket's path."""
    import tempfile

    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with make_own() as scheduler:
        (worker,) = scheduler.create_workers(Job(role="a"))
        assert Engine.create(scheduler, worker, Counter).call("add") == 1
    assert [path for path in long.rglob("*") if not path.is_dir()] == []
    assert not list(long.glob(f"helmsman-{run_id(scheduler)}-*"))
