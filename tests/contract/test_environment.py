"""Environment of workers: values, sources, threads and the search path."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from helmsman._base.interfaces import ipv4_interfaces
from helmsman.api.environment import EnvironmentVariable
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from tests.contract.engines import Counter
from tests.contract.helpers import Engine
from tests.contract.marks import needs_processes, ray_smoke

UNUSUAL = {
    "CONTRACT_A": "1,2,3",
    "CONTRACT_B": "a=b=c,d=e",
    "CONTRACT_C": "two\nlines\n",
    "CONTRACT_D": " é \t",
    "CONTRACT_E": "",
}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def described(scheduler: Scheduler, worker_id: str) -> dict[str, EnvironmentVariable]:
    variables = scheduler.environment(worker_id.rpartition("/")[0])[worker_id]
    assert [each.name for each in variables] == sorted(each.name for each in variables)
    return {each.name: each for each in variables}


def change_environment(name: str, value: str) -> None:
    os.environ[name] = value


def torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def test_environment_unusual_values(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(env_vars=UNUSUAL)]))
    engine = Engine.create(scheduler, worker, Counter)
    assert engine.call("environ", *UNUSUAL) == UNUSUAL
    found = described(scheduler, worker)
    assert {name: found[name].value for name in UNUSUAL} == UNUSUAL
    assert {found[name].source for name in UNUSUAL} == {"spec.env_vars"}
    later = {f"{name}_LATER": value for name, value in UNUSUAL.items()}
    asyncio.run(scheduler.set_worker_env(worker, later))
    assert engine.call("environ", *later) == later


@ray_smoke
@needs_processes
def test_environment_forwarded_by_list(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_CONTRACT", "a,b=c")
    monkeypatch.setenv("CONTRACT_UNLISTED", "stays")
    monkeypatch.setenv("MASTER_ADDR", "the driver's")
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "77")
    (worker,) = scheduler.create_workers(Job(role=role))
    found = described(scheduler, worker)
    assert found["NCCL_CONTRACT"] == EnvironmentVariable("NCCL_CONTRACT", "a,b=c", "driver")
    assert found["CUDA_VISIBLE_DEVICES"] == EnvironmentVariable(
        "CUDA_VISIBLE_DEVICES", "", "devices"
    )
    assert found.get("MASTER_ADDR") is None
    assert found.get("LOCAL_RANK") is None
    assert found.get("CONTRACT_UNLISTED") is None
    assert found["PATH"].value, "programs are found"


@needs_processes
def test_environment_interface_of_gloo(scheduler: Scheduler, role: str) -> None:
    """Without this variable, gloo uses the address of the host name, which may be loopback."""
    chosen = {"GLOO_SOCKET_IFNAME": "mine", "CONTRACT_TASK": "1"}
    job = Job(role=role, replicas=2, tasks=[SchedulingSpec(), SchedulingSpec(env_vars=chosen)])
    own, given = scheduler.create_workers(job)
    found = described(scheduler, own)["GLOO_SOCKET_IFNAME"]
    assert ipv4_interfaces()[found.value] == scheduler.get_workers(role)[0].ip
    assert found.source == "helmsman"
    assert described(scheduler, given)["GLOO_SOCKET_IFNAME"].value == "mine"
    assert described(scheduler, given)["TP_SOCKET_IFNAME"].value == found.value
    assert "CONTRACT_TASK" not in described(scheduler, own), "each task has its own variables"


@ray_smoke
def test_environment_sources(
    scheduler: Scheduler, backend: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_CONTRACT", "x")
    spec = SchedulingSpec(env_vars={"CONTRACT_SPEC": "1", "CONTRACT_CHANGED": "1"})
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[spec]))
    asyncio.run(scheduler.set_worker_env(worker, {"CONTRACT_SET_LATER": "2"}))
    engine = Engine.create(scheduler, worker, Counter)
    engine.call("apply", change_environment, "CONTRACT_CHANGED", "3")
    engine.call("apply", change_environment, "CONTRACT_NEW", "4")
    found = described(scheduler, worker)
    expected = {
        "WANDB_CONTRACT": ("x", "driver"),
        "CONTRACT_SPEC": ("1", "spec.env_vars"),
        "CONTRACT_SET_LATER": ("2", "set_worker_env"),
        "CONTRACT_CHANGED": ("3", "engine"),
        "CONTRACT_NEW": ("4", "engine"),
    }
    assert {name: (found[name].value, found[name].source) for name in expected} == expected
    assert found["PATH"].source == ("node" if backend == "ray" else "driver")
    if backend != "inline":
        assert found["HELMSMAN_WORKER_TAG"].source == "helmsman"


@needs_processes
def test_environment_threads_follow_cpus(scheduler: Scheduler, role: str) -> None:
    specs = [
        SchedulingSpec(cpu=2),
        SchedulingSpec(cpu=0.5),
        SchedulingSpec(cpu=2, env_vars={"OMP_NUM_THREADS": "1"}),
    ]
    workers = scheduler.create_workers(Job(role=role, replicas=3, tasks=specs))
    for worker, count in zip(workers, (2, 1, 1), strict=True):
        engine = Engine.create(scheduler, worker, Counter)
        assert engine.call("environ", *THREADS) == dict.fromkeys(THREADS, str(count))
        # By itself, torch uses at most the cores of the machine.
        assert engine.call("apply", torch_threads) == count


def test_environment_search_path(
    scheduler: Scheduler, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers import from the folders that the script has added to sys.path."""
    (tmp_path / "module_of_script.py").write_text(
        "class Here:\n    def where(self):\n        return __file__\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    scheduler.create_workers(Job(role=role))
    here = Engine.create(scheduler, f"{role}/0", "module_of_script.Here")
    assert here.call("where") == str(tmp_path / "module_of_script.py")
