"""Tests of the probe of a rendezvous address, for each fault that it reports."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator

import msgspec
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec, Worker
from helmsman.controller._scheduler import worker_requests
from helmsman.controller._scheduler.local import LocalScheduler
from helmsman.controller._training.train_controller import TrainController
from tests.controller.engines import RecordingTrainer

TEST_NET = "198.51.100.1"
"""Address for documentation (RFC 5737), which no network routes."""


class AddressedScheduler(LocalScheduler):
    """LocalScheduler that reports ``address``, if set, as the address of its workers."""

    address = ""

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        workers = super().get_workers(role, timeout)
        return [msgspec.structs.replace(worker, ip=self.address or worker.ip) for worker in workers]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AddressedScheduler]:
    with AddressedScheduler(log_dir=tmp_path_factory.mktemp("logs"), preload=()) as made:
        yield made


@pytest.fixture
def scheduler(local: AddressedScheduler) -> Iterator[AddressedScheduler]:
    """The scheduler without workers."""
    yield local
    local.address = ""
    local.delete_workers()


def start(scheduler: AddressedScheduler, replicas: int = 3) -> tuple[str, int]:
    """Start a role, and return address and port of its rank 0."""
    scheduler.create_workers(
        Job(role="train", replicas=replicas, tasks=[SchedulingSpec(port_count=1)])
    )
    master = scheduler.get_workers("train")[0]
    return master.ip, int(master.engine_ports[0])


def probe(scheduler: AddressedScheduler, address: str, port: int) -> None:
    asyncio.run(scheduler.probe_rendezvous("train", address, port))


def test_probe_rendezvous_leaves_the_port_free(scheduler: AddressedScheduler) -> None:
    address, port = start(scheduler)
    for _ in range(2):
        probe(scheduler, address, port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, port)).close()


def test_probe_rendezvous_of_a_port_in_use(scheduler: AddressedScheduler) -> None:
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


def test_probe_rendezvous_names_a_dead_rank(scheduler: AddressedScheduler) -> None:
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


def test_train_controller_at_an_address_that_no_rank_reaches(
    scheduler: AddressedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_requests, "LIMIT_S", 2.5)
    scheduler.address = TEST_NET
    actor = TrainController(scheduler, RecordingTrainer, Job(role="actor", replicas=2))
    with pytest.raises(
        errors.RendezvousError, match=rf"cannot connect to each other at {TEST_NET}:.*2 of 2 ranks"
    ) as caught:
        actor.initialize()
    assert sorted(caught.value.failed) == ["actor/0", "actor/1"]
    assert all(caught.value.failed.values())
    assert "not the address of its node, which is 127.0.0.1" in str(caught.value)
    assert scheduler.status() == []
