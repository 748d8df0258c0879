"""Starts are atomic: every worker of the job is ready and published, or nothing of it remains."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, Timeouts
from helmsman.controller._schedulers.factory import make_scheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Driver, Engine, wait_gone, wait_until
from tests.processes import command_of

TOO_MANY_PORTS = 60_000


def _held_by_groups() -> dict[str, Any]:
    """Ray's placement groups that are not removed, by id."""
    from ray.util.placement_group import placement_group_table

    return {
        id_: table for id_, table in placement_group_table().items() if table["state"] != "REMOVED"
    }


def _free() -> dict[str, float]:
    import ray

    return {
        name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")
    }


def test_create_workers_failure_leaves_nothing(
    backend: str, scheduler: Scheduler, shared_workers: list[str], role: str
) -> None:
    """The second replica asks for more ports than there are, when all processes run already."""
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
    wait_until(lambda: not (_workers_of_this_machine() - workers), "its processes are gone")
    if backend == "ray":
        wait_until(
            lambda: _held_by_groups().keys() == groups.keys(), "its placement group is removed"
        )
        wait_until(
            lambda: all(_free().get(name, 0) >= amount for name, amount in free.items()),
            "what it held is free",
        )
    assert scheduler.create_workers(Job(role=role)) == [f"{role}/0"], "the name is free again"


def _workers_of_this_machine() -> set[int]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        name = command_of(process)
        if "ray::RayRPCServer" in name or "helmsman: " in name:
            found.add(process.pid)
    return found


@pytest.mark.not_on("inline", "its workers have no log files")
def test_create_workers_worker_ends(backend: str, scheduler: Scheduler, role: str) -> None:
    """Its log cannot be opened, because a folder has the name."""
    log_dir = scheduler._run.log_dir  # type: ignore[attr-defined]
    (log_dir / f"{role}-1.log").mkdir()
    workers = _workers_of_this_machine()
    with pytest.raises(errors.WorkerStartError) as caught:
        scheduler.create_workers(Job(role=role, replicas=3))
    assert caught.value.worker_id == f"{role}/1"
    wait_until(lambda: not (_workers_of_this_machine() - workers), "the other workers are gone too")
    (log_dir / f"{role}-1.log").rmdir()
    assert len(scheduler.create_workers(Job(role=role, replicas=3))) == 3


@pytest.mark.not_on("inline", "its workers start at once")
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
    wait_until(lambda: not (_workers_of_this_machine() - workers), "its processes are gone")


# --- more than there is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "spec", "shortfall", "setting"),
    [
        (1, SchedulingSpec(cpu=999), "975 CPU", "Set SchedulingSpec.cpu to 24"),
        (
            1,
            SchedulingSpec(gpu=9, ray_placement_strategy="separate"),
            "1 GPU",
            "Set SchedulingSpec.gpu to 8",
        ),
        (3, SchedulingSpec(cpu=0, gpu=3), "1 GPU", "Set Job.replicas to 2"),
        (1, SchedulingSpec(mem=9000), "GB memory", "Set SchedulingSpec.mem to "),
        (
            1,
            SchedulingSpec(resources={"license": 1}),
            "1 license",
            "Set SchedulingSpec.resources to {'license': 0}",
        ),
        (1, SchedulingSpec(accelerator_type="H9000"), "accelerator_type:H9000", "SchedulingSpec"),
    ],
)
def test_create_workers_infeasible(
    backend: str,
    scheduler: Scheduler,
    role: str,
    replicas: int,
    spec: SchedulingSpec,
    shortfall: str,
    setting: str,
) -> None:
    if backend != "ray" and spec.accelerator_type:
        pytest.skip(f"{backend}: one machine offers no choice of nodes")
    groups = _held_by_groups() if backend == "ray" else {}
    with pytest.raises(errors.PlacementInfeasibleError) as caught:
        scheduler.create_workers(Job(role=role, replicas=replicas, tasks=[spec]))
    assert shortfall in caught.value.shortfall
    assert role in str(caught.value)
    assert setting in str(caught.value)
    if backend == "ray":
        assert _held_by_groups().keys() == groups.keys()


@pytest.mark.not_on("inline", "it has no devices to hand out")
def test_create_workers_names_own_holder(backend: str, scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(
        Job(role=f"{role}-holder", replicas=2, tasks=[SchedulingSpec(cpu=0, gpu=3)])
    )
    groups = _held_by_groups() if backend == "ray" else {}
    with pytest.raises(errors.PlacementTimeoutError) as caught:
        # at once: no other process would free the resources of this run
        scheduler.create_workers(Job(role=role, replicas=3, tasks=[SchedulingSpec(cpu=0, gpu=1)]))
    assert f"{role}-holder" in caught.value.holders
    assert "2" in caught.value.free
    if backend == "ray":
        wait_until(lambda: _held_by_groups().keys() == groups.keys(), "its group is removed")
    scheduler.delete_workers(f"{role}-holder")
    assert (
        len(
            scheduler.create_workers(
                Job(role=role, replicas=3, tasks=[SchedulingSpec(cpu=0, gpu=1)])
            )
        )
        == 3
    )


@pytest.mark.not_on("inline", "it has no devices to hand out")
@pytest.mark.not_on("local", "its machine's devices are its own to hand out")
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
        # Ray gives a pending group what has become free within a second
        other.timeouts = Timeouts()
        assert (
            len(
                other.create_workers(
                    Job(role=role, replicas=3, tasks=[SchedulingSpec(cpu=0, gpu=1)])
                )
            )
            == 3
        )


# --- devices --------------------------------------------------------------------------------------

MASKS = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@pytest.mark.not_on("inline", "it has no devices to hand out")
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
    assert len({id_ for ids in granted for id_ in ids}) == 6, "no device is given twice"
    assert masks[3]["CUDA_VISIBLE_DEVICES"] == "", "a worker that asked for none sees none"
    assert {mask["ASCEND_RT_VISIBLE_DEVICES"] for mask in masks} == {""}


@pytest.mark.slow
@pytest.mark.not_on("inline", "it has no devices to hand out")
def test_devices_without_torch(backend: str, run_driver: Callable[..., Driver]) -> None:
    """With a mask of its own in the environment, and where importing torch raises."""
    variable, options = {
        "ray": ("ASCEND_RT_VISIBLE_DEVICES", "num_gpus=0, resources={'NPU': 8}"),
        "local": ("CUDA_VISIBLE_DEVICES", "num_gpus=8, accelerator='cuda'"),
    }[backend]
    driver = run_driver(
        f"""
sys.modules["torch"] = None  # as if it were not installed: importing it raises
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


@pytest.mark.slow
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
        assert "pip install 'helmsman[ray]'" in message
    else:
        assert driver.facts() == {"sum": 5, "ray": False}
    assert driver.wait() == 0
    driver.wait_nothing_left()


def test_make_scheduler_unknown_backend() -> None:
    with pytest.raises(
        errors.UnknownBackendError,
        match="there is no scheduler 'slurm'; choose one of: ray, local, inline",
    ):
        make_scheduler("slurm")


# --- the forkserver of local workers --------------------------------------------------------------

only_local = pytest.mark.usefixtures("local_alone")


@pytest.fixture
def local_alone(backend: str) -> None:
    if backend != "local":
        pytest.skip(f"{backend}: it has no forkserver")


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
    """The path of a Unix socket has 107 bytes at most; a user's TMPDIR is longer now and then."""
    import tempfile

    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with make_own() as scheduler:
        (worker,) = scheduler.create_workers(Job(role="a"))
        assert Engine.create(scheduler, worker, Counter).call("add") == 1
    assert [path for path in long.rglob("*") if not path.is_dir()] == [], (
        "of the records of runs only their folder is left"
    )
    assert not list(long.glob(f"helmsman-{scheduler.run_id}-*"))  # type: ignore[attr-defined]
