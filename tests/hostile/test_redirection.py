"""An attacker who leads connections astray: each worker answers only to connections that are meant for it."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from helmsman.api.scheduler import Job
from helmsman.controller._schedulers.factory import make_scheduler
from tests.contract import engines


class _Redirected(socket.socket):
    """Connections to Unix sockets of workers all go to the first of them."""

    first = ""

    def connect(self, address: Any) -> None:
        if isinstance(address, str) and address.startswith("\0helmsman-"):
            _Redirected.first = address = _Redirected.first or address
        super().connect(address)


async def test_redirected_connection_reaches_no_other_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", _Redirected)
    with make_scheduler("ray", address="local", num_cpus=2, preload=None) as scheduler:
        workers = scheduler.create_workers(Job(role="a", replicas=2))
        for worker in workers:
            await scheduler.create_engine(worker, engines.Counter)
        assert _Redirected.first
        pids = [await scheduler.async_call_engine(worker, "pid") for worker in workers]
        assert len(set(pids)) == 2
