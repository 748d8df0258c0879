"""Test that jobs of AReaL's classes become jobs of Helmsman."""

from __future__ import annotations

import dataclasses
import enum
import logging
import shlex
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


def test_job_of_any_class_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    spec = TheirSpec(nodelist="n1, n2", env_vars={"A": 1}, image="mine", mount="/mine")
    job = converted(TheirJob("r", 2, [spec], TheirStrategy()))
    (ours,) = job.tasks
    assert (list(ours.nodelist), ours.env_vars, ours.port_count) == (["n1", "n2"], {"A": "1"}, 2)
    assert (ours.cpu, ours.mem, ours.cmd) == (8, 0, None)
    assert not job.scheduling_strategy.fork, "it is for colocated jobs only"
    (warning,) = [each.message for each in caplog.records if "no effect" in each.message]
    assert warning.endswith(": image, mount")


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


def test_command_gets_options() -> None:
    spec = SchedulingSpec(cmd="python3 -m my.server --verbose")
    job = converted(Job("r", 1, [spec]))  # type: ignore[arg-type]
    given = shlex.split(job.tasks[0].cmd or "")
    assert given[:4] == ["my.server", "--verbose", "--port", "{port}"]
    assert given[4:] == ["--worker-index", "{index}", "--role", "r"]
    guard, server = (
        SchedulingSpec(cmd=f"python -m areal.infra.rpc.{each}") for each in ("guard", "rpc_server")
    )
    job = converted(Job("r", 2, [guard, server]))  # type: ignore[arg-type]
    assert (job.tasks[0].cmd or "").startswith("areal.infra.rpc.guard --port")
    assert job.tasks[1].cmd is None, "a worker of Helmsman is one"
    for cmd in ("python script.py", "python -m"):
        with pytest.raises(areal.WorkerCreationError, match="expected 'python -m module argum"):
            converted(Job("r", 1, [SchedulingSpec(cmd=cmd)]))  # type: ignore[arg-type]
    job = converted(Job("r", 1, None))  # type: ignore[arg-type]
    assert job.tasks[0].cpu == SchedulingSpec().cpu
