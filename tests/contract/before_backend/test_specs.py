"""Specs of jobs: secrets in variables, ports, and commands with their readiness checks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from helmsman._base.interfaces import own_addresses
from helmsman.api import errors
from helmsman.api.environment import MASK, MASK_VARIABLE
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, Timeouts
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, answers, wait_until


def test_environment_masks_secrets(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MASK_VARIABLE, "contract_lic*, OTHER")
    names = [f"CONTRACT_{name}" for name in ("TOKEN", "API_KEY", "CREDS", "LICENCE")]
    pem = "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----\n"
    shown = {
        "CONTRACT_URL": ("http://me:hunter2@host/", f"http://{MASK}@host/"),
        "CONTRACT_PEM": (pem, f"{MASK}\n"),
        **dict.fromkeys(names, ("hunter2", MASK)),
    }
    secrets = {name: value for name, (value, _) in shown.items()}
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(env_vars=secrets)]))
    found = {each.name: each.value for each in scheduler.environment(role)[worker]}
    assert {name: found[name] for name in secrets} == {
        name: masked for name, (_, masked) in shown.items()
    }
    assert "hunter2" not in str(found)
    engine = Engine.create(scheduler, worker, Counter)
    assert engine.call("environ", *secrets) == secrets, "the worker itself has the secrets"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            "http.server {port3}",
            (
                "asks for {port3}, but the worker has 1 leased ports; set "
                "SchedulingSpec.port_count to 4"
            ),
        ),
        ("http.server 'unclosed", "No closing quotation"),
    ],
)
def test_command_invalid(scheduler: Scheduler, role: str, command: str, reason: str) -> None:
    with pytest.raises(errors.EngineCreationError) as caught:
        scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(cmd=command)]))
    assert reason in str(caught.value)
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.get_workers(role)


def ports_of(scheduler: Scheduler, role: str) -> list[list[int]]:
    return [[int(port) for port in worker.engine_ports] for worker in scheduler.get_workers(role)]


def test_command_starts_slowly(scheduler: Scheduler, role: str) -> None:
    spec = SchedulingSpec(cmd="tests.contract.slow_server {port} fail")
    with pytest.raises(
        errors.EngineCreationError,
        match=r"exit code 3; it counts as ready when port \d+ accepts connections",
    ):
        scheduler.create_workers(Job(role=role, tasks=[spec]))
    spec = SchedulingSpec(cmd="tests.contract.slow_server {port} serve")
    scheduler.create_workers(Job(role=role, tasks=[spec]))
    ((port,),) = ports_of(scheduler, role)
    assert answers(port)


_num_checks = 0


def third_check(ports: list[int]) -> bool:
    """Readiness check that passes at its third call in a process."""
    global _num_checks
    _num_checks += 1
    assert len(ports) == 2, "the check gets both ports"
    return _num_checks == 3


def test_command_ready_check(scheduler: Scheduler, role: str) -> None:
    spec = SchedulingSpec(
        cmd="http.server 0", port_count=2, cmd_ready=f"{__name__}.{third_check.__name__}"
    )
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[spec]))
    assert scheduler.call_engine(worker, "poll", "command") is None


def test_command_ready_time(scheduler: Scheduler, role: str) -> None:
    spec = SchedulingSpec(cmd="tests.contract.slow_server {port} serve", cmd_ready=0.01)
    scheduler.create_workers(Job(role=role, tasks=[spec]))
    ((port,),) = ports_of(scheduler, role)
    wait_until(lambda: answers(port), "the server listens after the start")
    with pytest.raises(errors.InvalidSpecError, match="cmd_ready is -1.0"):
        scheduler.create_workers(
            Job(role=f"{role}-2", tasks=[SchedulingSpec(cmd="http.server", cmd_ready=-1.0)])
        )


def test_command_never_ready(make_own: Callable[..., Scheduler], role: str) -> None:
    spec = SchedulingSpec(cmd="http.server 0 --bind 127.0.0.1", cmd_ready=f"{__name__}.never")
    with (
        make_own(timeouts=Timeouts(create_engine_s=4.0)) as scheduler,
        pytest.raises(errors.EngineCreationError) as caught,
    ):
        scheduler.create_workers(Job(role=role, tasks=[spec]))
    assert "was not ready within 3.6 s; it counts as ready when" in str(caught.value)
    assert "Set SchedulingSpec.cmd_ready, or raise Timeouts.create_engine_s" in str(caught.value)


def running(pids: Path) -> list[bool]:
    """Return whether each child of the command ``families`` runs."""
    return [
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in map(int, pids.read_text().split())
    ]


@pytest.mark.parametrize("end", ["kill", "delete"])
def test_command_children_end_with_it(
    scheduler: Scheduler, role: str, tmp_path: Path, end: str
) -> None:
    pids = tmp_path / "pids"
    spec = SchedulingSpec(cmd=f"tests.contract.families {{port}} serve {pids}")
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[spec]))
    assert running(pids) == [True, True]
    if end == "kill":
        os.kill(scheduler.call_engine(worker, "pid", "command"), signal.SIGKILL)
    else:
        scheduler.delete_workers(role)
    wait_until(lambda: running(pids) == [False, False], "the children end")


def test_command_children_stay_after_success(
    scheduler: Scheduler, role: str, tmp_path: Path
) -> None:
    """A command that names no port may start services and finish; they end with the worker."""
    pids = tmp_path / "pids"
    spec = SchedulingSpec(cmd=f"tests.contract.families 0 finish {pids}", cmd_ready=0.0)
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[spec]))
    wait_until(lambda: scheduler.call_engine(worker, "poll", "command") == 0, "it finishes")
    assert running(pids) == [True, True]
    for pid in map(int, pids.read_text().split()):
        os.kill(pid, signal.SIGKILL)


def test_command_at_other_address(scheduler: Scheduler, role: str) -> None:
    """A server that binds another address of the machine than the worker's counts as ready."""
    own = next((each for each in own_addresses() if not each.startswith("127.")), "127.0.0.1")
    spec = SchedulingSpec(cmd=f"http.server --bind {own} {{port}}")
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[spec]))
    assert scheduler.call_engine(worker, "endpoint", "command") == (own, None)


def never(ports: list[int]) -> bool:
    """Readiness check that never passes."""
    return False
