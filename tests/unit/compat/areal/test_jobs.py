"""Test that jobs of AReaL's classes become jobs of Helmsman."""

from __future__ import annotations

import dataclasses
import enum
import shlex
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import helmsman
from helmsman.compat import areal
from helmsman.compat.areal import Job, Scheduler, SchedulingSpec


class Kind(enum.StrEnum):
    colocation = "colocation"


@dataclasses.dataclass
class TheirSpec:
    """A spec of AReaL's, which Helmsman does not import."""

    cpu: int = 8
    gpu: int = 0
    port_count: int = 1
    nodelist: str | None = None
    env_vars: dict[str, Any] = dataclasses.field(default_factory=dict)
    image: str = "some/image"
    mount: str = "/storage"
    srun_additional_args: str = "--mpi"


@dataclasses.dataclass
class TheirStrategy:
    type: Any = "separation"
    target: str | None = None
    fork: bool = True


@dataclasses.dataclass
class TheirJob:
    role: str
    replicas: int
    tasks: list[TheirSpec]
    scheduling_strategy: TheirStrategy


def converted(job: TheirJob) -> helmsman.Job:
    """Return the job that a scheduler of Helmsman receives."""
    received: list[helmsman.Job] = []

    class Recorder(helmsman.InlineScheduler):
        def create_workers(self, job: Any) -> list[str]:
            received.append(job)
            return []

    with Scheduler(Recorder(), 1.0) as scheduler:
        scheduler.create_workers(job)
    received[0].validate()
    return received[0]


def spec_of(spec: Any) -> helmsman.SchedulingSpec:
    """Return the spec that a job with one of AReaL's gets."""
    return converted(Job("r", 1, [spec])).tasks[0]  # type: ignore[arg-type]


def test_spec_has_fields_and_defaults_of_areal() -> None:
    assert dataclasses.asdict(SchedulingSpec()) == {
        "cpu": 8,
        "gpu": 0,
        "mem": 32,
        "port_count": 2,
        "image": "/storage/openpsi/images/areal-latest.sif",
        "task_type": "worker",
        "env_vars": {},
        "cmd": None,
        "srun_additional_args": "--unbuffered --mpi=pmi2 -K --chdir $PWD",
        "additional_bash_cmds": None,
        "container_type": "apptainer",
        "mount": "/storage:/storage",
        "nodelist": None,
        "reservation": None,
        "exclusive": False,
        "exclude": None,
        "ray_placement_strategy": None,
    }
    ours = helmsman.SchedulingSpec(cpu=8, port_count=2, nodelist=[], exclude=[])
    assert spec_of(SchedulingSpec()) == ours


def test_job_of_any_class_with_fields() -> None:
    spec = TheirSpec(nodelist="n1, n2", env_vars={"A": 1})
    job = converted(TheirJob("r", 2, [spec], TheirStrategy()))
    (ours,) = job.tasks
    assert (list(ours.nodelist), ours.env_vars, ours.port_count) == (["n1", "n2"], {"A": "1"}, 1)
    assert (ours.cpu, ours.mem, ours.cmd) == (8, 0, None)
    assert not job.scheduling_strategy.fork, "it is for colocated jobs only"


@pytest.mark.parametrize(
    "spec",
    [
        {"cpu": 2, "env_vars": {"NCCL_TIMEOUT": 600}, "exclusive": False, "reservation": None},
        SimpleNamespace(cpu=2, env_vars={"NCCL_TIMEOUT": 600}, image="", container_type="none"),
        SchedulingSpec(cpu=2, env_vars={"NCCL_TIMEOUT": 600}, port_count=1, task_type="engine"),  # type: ignore[dict-item]
    ],
)
def test_spec_of_yaml_or_object(spec: Any) -> None:
    ours = spec_of(spec)
    assert (ours.cpu, ours.env_vars) == (2, {"NCCL_TIMEOUT": "600"})


@pytest.mark.parametrize(("port_count", "ours"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_port_count(port_count: int, ours: int) -> None:
    assert spec_of(SchedulingSpec(port_count=port_count)).port_count == ours


@pytest.mark.parametrize(
    ("given", "ours"), [(None, "shared"), ("shared", "shared"), ("separate", "separate")]
)
def test_ray_placement_strategy(given: str | None, ours: str) -> None:
    assert spec_of(SchedulingSpec(ray_placement_strategy=given)).ray_placement_strategy == ours


@dataclasses.dataclass
class LaterSpec(SchedulingSpec):
    """A spec of a later AReaL, with another field."""

    priority: int = 0


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            SchedulingSpec(exclusive=True),
            "exclusive is True, expected False. Give it to the sbatch",
        ),
        (
            SchedulingSpec(reservation="week"),
            "reservation is 'week', expected None. Give it to the",
        ),
        (SchedulingSpec(image="/a.sif"), "image is '/a.sif', expected '/storage/"),
        (
            SchedulingSpec(mount="/data"),
            "mount is '/data', expected '/storage:/storage'. Start the",
        ),
        (
            SchedulingSpec(container_type="docker"),
            "container_type is 'docker', expected 'apptainer'",
        ),
        (SchedulingSpec(srun_additional_args="-K"), "srun_additional_args is '-K', expected '--un"),
        (
            SchedulingSpec(additional_bash_cmds=["pip install x"]),
            "additional_bash_cmds is ['pip install x'], expected None. Run them on the nodes",
        ),
        (SchedulingSpec(task_type="pod"), "task_type is 'pod', expected 'worker' or 'engine'"),
        (SchedulingSpec(nodelist="n[1-4]"), "nodelist is 'n[1-4]', expected names with commas"),
        (LaterSpec(priority=3), "priority is 3, expected a known field: cpu, gpu, mem"),
        ({"cpu": 1, "priority": 3}, "priority is 3, expected a known field: cpu, gpu, mem"),
    ],
)
def test_field_without_counterpart_is_refused(spec: Any, reason: str) -> None:
    with pytest.raises(areal.WorkerCreationError) as refused:
        spec_of(spec)
    assert refused.value.worker_key == "r"
    assert reason in str(refused.value)
    assert "eave it out" in str(refused.value) or "Write the name" in str(refused.value)


def test_all_refused_fields_are_listed() -> None:
    with pytest.raises(areal.WorkerCreationError, match=r"exclusive is True.*image is '/a\.sif'"):
        spec_of(SchedulingSpec(exclusive=True, image="/a.sif"))


def test_job_with_strategy_of_enumeration() -> None:
    strategy = TheirStrategy(Kind.colocation, "actor")
    job = converted(TheirJob("r", 1, [TheirSpec(gpu=1)], strategy))
    assert job.scheduling_strategy == helmsman.SchedulingStrategy(
        type="colocation", target="actor", fork=True
    )
    assert job.tasks[0].gpu == 0, "those of the target"


def test_job_with_unknown_strategy() -> None:
    with pytest.raises(ValueError, match="expected 'separation' or 'colocation'"):
        converted(TheirJob("r", 1, [TheirSpec()], TheirStrategy("beside")))


OPTIONS = ["--port", "{port}", "--worker-index", "{index}", "--role", "r"]


@pytest.mark.parametrize(
    ("cmd", "module"),
    [
        ("python3 -m my.server --verbose", ["my.server", "--verbose"]),
        (f"{sys.executable} -m areal.v2.agent_service.guard", ["areal.v2.agent_service.guard"]),
        ("python -m areal.infra.rpc.guard", ["areal.infra.rpc.guard"]),
        ("python x.py --a 'b c'", ["helmsman.compat._program", "python", "x.py", "--a", "b c"]),
        ("python -u -m m", ["helmsman.compat._program", "python", "-u", "-m", "m"]),
        ("/opt/python3 -m m", ["helmsman.compat._program", "/opt/python3", "-m", "m"]),
        ("bash serve.sh", ["helmsman.compat._program", "bash", "serve.sh"]),
    ],
)
def test_command_gets_options(cmd: str, module: list[str]) -> None:
    assert shlex.split(spec_of(SchedulingSpec(cmd=cmd)).cmd or "") == module + OPTIONS


@pytest.mark.parametrize(
    "cmd", [None, "", "python3 -m areal.infra.rpc.rpc_server", "python -m areal.rpc.rpc_server"]
)
def test_command_of_rpc_server_is_worker(cmd: str | None) -> None:
    assert spec_of(SchedulingSpec(cmd=cmd)).cmd is None


@pytest.mark.parametrize(
    ("cmd", "reason"),
    [
        ("python x.py --port 8000", "expected no --port. Leave it out"),
        ("python x.py --port=8000", "expected no --port. Leave it out"),
        ("python 'x.py", "No closing quotation"),
        (["python", "x.py"], "expected one string. Join its words by shlex.join"),
        (
            "nsys profile python -m areal.infra.rpc.rpc_server",
            "Helmsman's worker runs in its place",
        ),
        ("python -m areal.infra.rpc.rpc_server --werkzeug-log-level DEBUG", "runs in its place"),
    ],
)
def test_command_is_refused(cmd: Any, reason: str) -> None:
    with pytest.raises(areal.WorkerCreationError) as refused:
        spec_of(SchedulingSpec(cmd=cmd))
    assert reason in str(refused.value)
    assert f"cmd is {cmd!r}" in str(refused.value)


def test_job_without_tasks() -> None:
    job = converted(Job("r", 1, None))  # type: ignore[arg-type]
    assert job.tasks[0].cpu == SchedulingSpec().cpu
