"""Ports of workers: unique, free of other programs, and free again after their owner has ended."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from helmsman._process.ports import RANGE_VARIABLE
from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.api.workers import worker_context
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, answers, wait_until
from tests.contract.marks import needs_processes, ray_smoke
from tests.own_ports import own_ports

NUM_WORKERS, NUM_PORTS, NUM_SQUATTERS = 8, 16, 50


class Owner:
    """Binds its ports without reuse options."""

    def __init__(self, ports: list[str]) -> None:
        self._listeners = [
            socket.create_server(("0.0.0.0", int(port)), reuse_port=False) for port in ports[::2]
        ]
        for port in ports[1::2]:
            self._listeners.append(socket.socket())
            self._listeners[-1].bind(("0.0.0.0", int(port)))
            self._listeners[-1].listen()

    def bound(self) -> list[int]:
        return [listener.getsockname()[1] for listener in self._listeners]

    def destroy(self) -> None:
        for listener in self._listeners:
            listener.close()


class Asker:
    """Reads the worker context in its constructor and later."""

    def __init__(self) -> None:
        self._context = worker_context()

    def seen(self) -> list[Any]:
        """Return worker, node and ports of its constructor's context, and the context of now."""
        context = self._context
        assert context is not None
        return [context.worker_id, context.node, list(context.ports), worker_context()]


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Iterator[range]:
    """Provide the ports that workers may lease."""
    with own_ports() as ports:
        monkeypatch.setenv(RANGE_VARIABLE, f"{ports[0]}-{ports[-1]}")
        yield ports


@pytest.fixture
def squatted(available: range) -> Iterator[set[int]]:
    """Bind some of these ports for other programs, half of them without listening."""
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
    assert int(found[1]) >= NUM_SQUATTERS, message  # other programs may run
    assert f"{available[0]}-{available[-1]}" in message
    assert RANGE_VARIABLE in message


@ray_smoke
@needs_processes
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
        "its death is detected",
    )
    scheduler.create_workers(Job(role=f"{role}-heir", tasks=[spec]))
    assert sorted(leased(scheduler, f"{role}-heir")[0]) == list(available)


# --- commands -------------------------------------------------------------------------------------


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
        assert "/no/1" in file.read().split("\0"), "{index} is the index of the worker"


@needs_processes
def test_command_fails_start(scheduler: Scheduler, role: str) -> None:
    with pytest.raises(errors.EngineCreationError) as caught:
        scheduler.create_workers(
            Job(role=role, tasks=[SchedulingSpec(cmd="no.such.module {port}")])
        )
    assert "ended with exit code 1; it counts" in str(caught.value)
    assert "No module named" in str(caught.value), "the error has the output of the command"
    with pytest.raises(errors.RoleNotFoundError):
        scheduler.get_workers(role)


@ray_smoke
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
