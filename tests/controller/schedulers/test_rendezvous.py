"""Where ranks meet is tried before they wait there: each fault is caused, and told with its
reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec, Worker
from helmsman.controller._schedulers import worker_requests as rendezvous
from helmsman.controller._schedulers.local import LocalScheduler
from helmsman.controller._training.train_controller import TrainController
from helmsman.rpc_server._host.connectivity import Listener, reach
from tests.controller.engines import RecordingTrainer

TEST_NET = "198.51.100.1"
"""An address for documentation (RFC 5737): no network routes it."""


class LocalAtAnotherAddress(LocalScheduler):
    """Tells a wrong address of its nodes, as one does whose name resolves to another network."""

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        return [
            msgspec.structs.replace(worker, ip=TEST_NET)
            for worker in super().get_workers(role, timeout)
        ]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalScheduler]:
    with LocalScheduler(log_dir=tmp_path_factory.mktemp("logs"), preload=()) as made:
        yield made


@pytest.fixture
def scheduler(local: LocalScheduler) -> Iterator[LocalScheduler]:
    """Without workers."""
    yield local
    local.delete_workers()


def start(scheduler: LocalScheduler, replicas: int = 3) -> tuple[str, int]:
    """Address and port of a role's rank 0."""
    scheduler.create_workers(
        Job(role="train", replicas=replicas, tasks=[SchedulingSpec(port_count=1)])
    )
    master = scheduler.get_workers("train")[0]
    return master.ip, int(master.engine_ports[0])


def probe(scheduler: LocalScheduler, address: str, port: int) -> None:
    asyncio.run(scheduler.probe_rendezvous("train", address, port))


@pytest.mark.slow
def test_probe_rendezvous_leaves_the_port_free(scheduler: LocalScheduler) -> None:
    address, port = start(scheduler)
    for _ in range(2):
        probe(scheduler, address, port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, port)).close()


@pytest.mark.slow
def test_probe_rendezvous_port_that_is_taken(scheduler: LocalScheduler) -> None:
    address, port = start(scheduler)
    with socket.socket() as squatter:
        squatter.bind(("0.0.0.0", port))
        squatter.listen()
        with pytest.raises(errors.RendezvousError) as caught:
            probe(scheduler, address, port)
    assert f"rank 0 cannot listen on port {port}: Address already in use" in str(caught.value)
    assert "rank 0 is train/0; 127.0.0.1 is the address of its node" in str(caught.value)
    assert f"port {port} is leased to it" in str(caught.value)
    assert (caught.value.reached, caught.value.failed) == ([], {})


@pytest.mark.slow
def test_probe_rendezvous_address_that_no_rank_reaches(
    scheduler: LocalScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LIMIT_S", 2.5)
    _, port = start(scheduler)
    with pytest.raises(errors.RendezvousError) as caught:
        probe(scheduler, TEST_NET, port)
    assert sorted(caught.value.failed) == ["train/0", "train/1", "train/2"]
    assert all(caught.value.failed.values())
    assert "not the address of its node, which is 127.0.0.1" in str(caught.value)
    assert "3 of 3 ranks" in str(caught.value)
    probe(scheduler, "127.0.0.1", port)


@pytest.mark.slow
def test_probe_rendezvous_names_a_dead_rank(scheduler: LocalScheduler) -> None:
    address, port = start(scheduler)
    pids = {status.worker_id: status.pid for status in scheduler.status()}
    asyncio.run(scheduler.create_engine("train/1", RecordingTrainer))
    os.kill(int(pids["train/1"] or 0), signal.SIGKILL)
    with pytest.raises(errors.WorkerFailedError):
        scheduler.call_engine("train/1", "report")
    with pytest.raises(errors.RendezvousError) as caught:
        probe(scheduler, address, port)
    assert caught.value.reached == ["train/0", "train/2"]
    assert "SIGKILL" in caught.value.failed["train/1"]


@pytest.mark.slow
def test_train_controller_on_a_wrong_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LIMIT_S", 2.5)
    with LocalAtAnotherAddress(log_dir=tmp_path, preload=()) as scheduler:
        actor = TrainController(scheduler, RecordingTrainer, Job(role="actor", replicas=2))
        with pytest.raises(
            errors.RendezvousError, match=rf"cannot connect to each other at {TEST_NET}:.*2 of 2"
        ):
            actor.initialize()
        assert scheduler.status() == []


# --- the two ends ---------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "proof", "outcome"),
    [
        ("127.0.0.1", b"proof", ""),
        ("::1", b"proof", ""),
        ("127.0.0.1", b"wrong", "another program answers there"),
    ],
)
def test_reach_while_a_listener_listens(
    listener: Listener, address: str, proof: bytes, outcome: str
) -> None:
    port = free_port()
    assert listener.listen(port, b"proof", 30.0) == ""
    assert reach(address, port, proof, 30.0) == outcome
    assert listener.listen(None) == ""
    assert reach(address, port, proof, 30.0) == "Connection refused"


def test_reach_silent_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert (
            reach("127.0.0.1", silent.getsockname()[1], b"proof", 0.2) == "no answer within 0.2 s"
        )


def test_reach_beside_silent_peers(listener: Listener) -> None:
    port = free_port()
    assert listener.listen(port, b"proof", 30.0) == ""
    with contextlib.ExitStack() as silent:
        for _ in range(300):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert [reach("127.0.0.1", port, b"proof", 10.0) for _ in range(10)] == [""] * 10


def test_reach_by_many_at_once_leaves_the_port_free(listener: Listener) -> None:
    port = free_port()
    assert listener.listen(port, b"proof", 30.0) == ""
    outcomes: list[Any] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(reach("127.0.0.1", port, b"proof", 30.0)))
        for _ in range(200)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [""] * 200
    listener.close()
    with socket.socket() as plain:
        # without SO_REUSEADDR, so a connection that lingers would be in the way
        plain.bind(("127.0.0.1", port))
