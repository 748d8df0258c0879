"""Ports of workers on every scheduler: apart from each other's and everybody's, bound by their
owners, free when those end.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, Timeouts
from helmsman.api.workers import worker_context
from helmsman.rpc_server.ports import RANGE_VARIABLE
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, wait_until
from tests.own_ports import own_ports

NUM_WORKERS, NUM_PORTS, NUM_SQUATTERS = 8, 16, 50


class Owner:
    """Binds its ports as the plainest program does."""

    def __init__(self, ports: list[str]) -> None:
        self._listeners = [
            socket.create_server(("0.0.0.0", int(port)), reuse_port=False) for port in ports[::2]
        ]
        for port in ports[1::2]:
            self._listeners.append(socket.socket())
            self._listeners[-1].bind(("0.0.0.0", int(port)))
            self._listeners[-1].listen()

    def bound(self) -> list[int]:
        """The ports it listens on."""
        return [listener.getsockname()[1] for listener in self._listeners]

    def destroy(self) -> None:
        """Close them."""
        for listener in self._listeners:
            listener.close()


class Asker:
    """Asks for its worker when it is made, and later."""

    def __init__(self) -> None:
        self._context = worker_context()

    def seen(self) -> list[Any]:
        """Who made it, where, with which ports; and what it is told afterwards."""
        context = self._context
        assert context is not None
        return [context.worker_id, context.node, list(context.ports), worker_context()]


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Iterator[range]:
    """The ports that workers may lease."""
    with own_ports() as ports:
        monkeypatch.setenv(RANGE_VARIABLE, f"{ports[0]}-{ports[-1]}")
        yield ports


@pytest.fixture
def squatted(available: range) -> Iterator[set[int]]:
    """Those of them that other programs have bound, half of them without listening."""
    with contextlib.ExitStack() as stack:
        taken = set()
        for number, port in enumerate(random.Random(7).sample(available, NUM_SQUATTERS)):
            squatter = stack.enter_context(socket.socket())
            squatter.bind(("127.0.0.1" if number % 3 else "0.0.0.0", port))
            if number % 2:
                squatter.listen()
            taken.add(port)
        yield taken


def leased(scheduler: Scheduler, role: str) -> list[list[int]]:
    return [[int(port) for port in worker.engine_ports] for worker in scheduler.get_workers(role)]


def test_ports_among_squatters(
    scheduler: Scheduler, role: str, available: range, squatted: set[int]
) -> None:
    spec = SchedulingSpec(cpu=1, port_count=NUM_PORTS)
    workers = scheduler.create_workers(Job(role=role, replicas=NUM_WORKERS, tasks=[spec]))
    ports = leased(scheduler, role)
    everything = [port for each in ports for port in each]
    assert len(set(everything)) == NUM_WORKERS * NUM_PORTS
    assert not squatted & set(everything)
    assert set(everything) <= set(available)
    owners = [
        Engine.create(scheduler, worker, Owner, None, list(map(str, each)))
        for worker, each in zip(workers, ports, strict=True)
    ]
    assert [sorted(owner.call("bound")) for owner in owners] == [sorted(each) for each in ports]
    with pytest.raises(errors.WorkerStartError) as caught:
        scheduler.create_workers(Job(role=f"{role}-more", tasks=[SchedulingSpec(port_count=128)]))
    message = str(caught.value)
    assert f"leased {NUM_WORKERS * NUM_PORTS}" in message
    found = re.search(r"other programs have bound (\d+)", message)
    assert found is not None, message
    assert int(found[1]) >= NUM_SQUATTERS, message  # and whatever else there is on this machine
    assert f"{available[0]}-{available[-1]}" in message
    assert RANGE_VARIABLE in message


@pytest.mark.not_on("inline", "its workers are not processes")
@pytest.mark.skipif(
    sys.platform != "linux", reason="leases are sockets of Linux's abstract namespace"
)
def test_ports_of_killed_worker_free(scheduler: Scheduler, role: str, available: range) -> None:
    spec = SchedulingSpec(port_count=len(available))
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[spec]))
    engine = Engine.create(scheduler, worker, Counter)
    with pytest.raises(
        errors.WorkerStartError, match=r"only 0 of 1 ports are free: .* leased 255, "
    ):
        scheduler.create_workers(Job(role=f"{role}-other", tasks=[SchedulingSpec(port_count=1)]))
    os.kill(engine.call("pid"), signal.SIGKILL)
    wait_until(
        lambda: all(
            status.health is None for status in scheduler.status() if status.worker_id == worker
        ),
        "its death",
    )
    scheduler.create_workers(Job(role=f"{role}-heir", tasks=[spec]))
    assert sorted(leased(scheduler, f"{role}-heir")[0]) == list(available)


def test_port_range_invalid(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RANGE_VARIABLE, "20000")
    with pytest.raises(
        errors.WorkerStartError, match=r"HELMSMAN_PORT_RANGE is '20000'; expected 'FIRST-LAST'"
    ):
        scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(port_count=1)]))


# --- commands -------------------------------------------------------------------------------------


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0):
        return True
    return False


def test_command_binds_ports(scheduler: Scheduler, role: str) -> None:
    two = SchedulingSpec(
        cmd="http.server --bind 127.0.0.1 {port1}",
        port_count=2,
        env_vars={"CONTRACT_CMD": "a b,c=d"},
    )
    one = SchedulingSpec(cmd="http.server --bind '127.0.0.1' --directory /no/{index} {port}")
    worker, other = scheduler.create_workers(Job(role=role, replicas=2, tasks=[two, one]))
    ports, (port,) = leased(scheduler, role)
    assert answers(ports[1])
    assert answers(port)
    with open(f"/proc/{scheduler.call_engine(worker, 'pid', 'command')}/environ") as file:
        environment = dict(entry.split("=", 1) for entry in file.read().split("\0") if "=" in entry)
    assert environment["HELMSMAN_PORTS"] == f"{ports[0]},{ports[1]}"
    assert environment["CONTRACT_CMD"] == "a b,c=d"
    with open(f"/proc/{scheduler.call_engine(other, 'pid', 'command')}/cmdline") as file:
        assert "/no/1" in file.read().split("\0"), "the worker's number in its role"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no.such.module {port}", "ended with exit code 1; it counts"),
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
def test_command_fails_start(
    scheduler: Scheduler, backend: str, role: str, command: str, reason: str
) -> None:
    with pytest.raises(errors.EngineCreationError) as caught:
        scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(cmd=command)]))
    assert reason in str(caught.value)
    if "module" in command and backend != "inline":
        assert "No module named" in str(caught.value), "what the child wrote"
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.get_workers(role)


def test_command_starts_slowly(scheduler: Scheduler, role: str) -> None:
    spec = SchedulingSpec(cmd="tests.contract.slow_server {port} fail")
    with pytest.raises(
        errors.EngineCreationError,
        match=r"exit code 3; it counts as ready when port \d+ accepts connections",
    ):
        scheduler.create_workers(Job(role=role, tasks=[spec]))
    spec = SchedulingSpec(cmd="tests.contract.slow_server {port} serve")
    scheduler.create_workers(Job(role=role, tasks=[spec]))
    ((port,),) = leased(scheduler, role)
    assert answers(port)


_num_checks = 0


def third_check(ports: list[int]) -> bool:
    """Readiness check that passes when called for the third time in a process."""
    global _num_checks
    _num_checks += 1
    assert len(ports) == 2, "both ports of the worker"
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
    ((port,),) = leased(scheduler, role)
    wait_until(lambda: answers(port), "the server listens later")
    with pytest.raises(errors.InvalidSpecError, match="cmd_ready is -1.0"):
        scheduler.create_workers(
            Job(role=f"{role}-2", tasks=[SchedulingSpec(cmd="http.server", cmd_ready=-1.0)])
        )


def test_command_never_ready(make_own: Callable[..., Scheduler], role: str) -> None:
    spec = SchedulingSpec(cmd="http.server 0 --bind 127.0.0.1", cmd_ready=f"{__name__}.never")
    with (
        make_own(timeouts=Timeouts(create_engine_s=3.0)) as scheduler,
        pytest.raises(errors.EngineCreationError) as caught,
    ):
        scheduler.create_workers(Job(role=role, tasks=[spec]))
    assert "was not ready within 2.7 s; it counts as ready when" in str(caught.value)
    assert "Set SchedulingSpec.cmd_ready, or raise Timeouts.create_engine_s" in str(caught.value)


def never(ports: list[int]) -> bool:
    """Readiness check that does not pass."""
    return False


def test_worker_context_has_ports(scheduler: Scheduler, role: str) -> None:
    scheduler.create_workers(Job(role=role, replicas=2, tasks=[SchedulingSpec(port_count=2)]))
    for worker in scheduler.get_workers(role):
        worker_id, node, ports, later = Engine.create(scheduler, worker.id, Asker).call("seen")
        assert (worker_id, node, ports) == (
            worker.id,
            worker.ip,
            [int(port) for port in worker.engine_ports],
        )
        assert later is None
