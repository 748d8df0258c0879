"""Workers on Ray that share no memory with the script, as on another machine: TLS, lost
connections, the object store and the observer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import signal
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="its workers are Ray actors")

from helmsman._base.event_loop import background_loop
from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, WorkerHealth
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from helmsman.controller._scheduler.transport import channel as channel_module
from helmsman.controller._scheduler.transport.channel import Channel
from tests.contract.engines import Counter, release_interpreter
from tests.contract.helpers import LIMIT_S, Engine, Gate, stop, wait_until

SEGMENTS = "helmsman.controller._scheduler.ray.transport.HAS_SEGMENTS"


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    with RayScheduler(
        address="local", num_cpus=16, log_dir=tmp_path_factory.mktemp("logs")
    ) as made:
        yield made


@pytest.fixture
def far(scheduler: Scheduler, role: str) -> Engine:
    """Provide a Counter in a worker that shares no memory with the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SEGMENTS, False)
        return _counter(scheduler, role)


def _counter(scheduler: Scheduler, role: str) -> Engine:
    (worker,) = scheduler.create_workers(Job(role=role))
    return Engine.create(scheduler, worker, Counter)


def _channel(engine: Engine) -> Channel:
    channel = engine.scheduler._roles.client(engine.worker_id).transport  # type: ignore[attr-defined]
    assert isinstance(channel, Channel)
    return channel


def _socket(engine: Engine) -> socket.socket:
    sock = _channel(engine)._socket
    assert sock is not None
    return sock


# --- lost connections -----------------------------------------------------------------------------


def _on_loop(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on the controller's loop."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    background_loop().call_soon_threadsafe(lambda: done.set_result(function(*args)))
    return done.result(LIMIT_S)


def _cut(engine: Engine, kind: str) -> None:
    """Lose the connection; a reset also loses the bytes that the worker has not read yet."""
    channel, sock = _channel(engine), _socket(engine)

    def cut() -> None:
        if kind == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif kind == "shutdown":
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
        channel._drop(sock)

    _on_loop(cut)


@pytest.mark.parametrize("kind", ["close", "reset", "shutdown"])
def test_channel_cut_before_requests_read(far: Engine, kind: str) -> None:
    channel, pid = _channel(far), far.call("pid")
    stop(pid)
    try:
        unread = [far.begin("add") for _ in range(5)]
        wait_until(lambda: len(channel._awaited) == 5, "the requests are written")
        _cut(far, kind)
        unread.append(far.begin("add"))
        wait_until(lambda: len(channel._awaited) == 6, "another request is posted")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [each.result(LIMIT_S) for each in unread] == [1, 2, 3, 4, 5, 6]
    assert far.call("add", 0) == 6


@pytest.mark.parametrize(
    ("kind", "num_bytes"), [("close", 0), ("shutdown", 1 << 10), ("reset", 1 << 21)]
)
def test_channel_cut_before_replies_read(
    far: Engine, tmp_path: Path, kind: str, num_bytes: int
) -> None:
    _on_loop(background_loop().remove_reader, _socket(far))
    calls = [far.begin("add"), far.begin("make", num_bytes)]
    marked = tmp_path / "executed"
    calls.append(far.begin("apply", os.mkdir, str(marked)))
    wait_until(marked.exists, "all calls are executed")
    _cut(far, kind)
    assert calls[0].result(LIMIT_S) == 1
    assert calls[1].result(LIMIT_S).sum() == 7 * num_bytes
    assert calls[2].result(LIMIT_S) is None
    assert far.call("add") == 2


def test_channel_not_restored_fails_worker(
    far: Engine,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused() -> socket.socket:
        raise TimeoutError("no connection within 3 s")

    pid = far.call("pid")
    monkeypatch.setattr(channel_module, "RECONNECT_S", 0.2)
    waiting = far.begin("wait", *gate.files)
    gate.wait_started()
    _channel(far)._connector.connect = refused
    _cut(far, "close")
    with pytest.raises(
        errors.WorkerFailedError,
        match="connection was lost and could not be restored within 0.2 s: no conn",
    ) as lost:
        waiting.result(LIMIT_S)
    assert lost.value.pid == pid
    with pytest.raises(
        errors.WorkerFailedError, match="was ended by this scheduler: its connection was lost"
    ):
        far.call("add")
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "its process has ended")


# --- payloads, which large ones take by the object store ------------------------------------------


def test_channel_payloads_of_all_sizes(far: Engine) -> None:
    sizes = [0, 1 << 21, 0, 1 << 10, (1 << 20) - 4096, 1 << 23, 0, 1 << 15, 0]
    calls = [
        far.begin("note_number", index, torch.zeros(size, dtype=torch.uint8))
        for index, size in enumerate(sizes)
    ]
    for call in calls:
        call.result(LIMIT_S)
    assert far.call("numbers") == list(range(len(sizes))), "no argument overtakes another"
    for size in sizes:
        value = torch.arange(size, dtype=torch.uint8)
        assert torch.equal(far.call("echo", value), value)
        assert _channel(far).is_open


def test_kept_results_reach_other_machines(
    scheduler: Scheduler, role: str, far: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value lies in a segment until a worker needs it that cannot map the segment."""
    near, neighbour = (
        Engine.create(scheduler, worker, Counter)
        for worker in scheduler.create_workers(Job(role=f"{role}-near", replicas=2))
    )
    monkeypatch.setattr(SEGMENTS, False)
    other = _counter(scheduler, f"{role}-far")
    keep = {"keep": True}
    kept = near.call("make", 1 << 20, rpc_meta=keep)
    put = scheduler.put(torch.full((1 << 20,), 3))
    apart = far.call("make", 1 << 10, rpc_meta=keep)
    for engine in (neighbour, far, other, near, far):
        assert engine.call("total", kept, put, apart) == (7 << 20) + (3 << 20) + (7 << 10)
    assert scheduler.get(kept).sum() == 7 << 20
    for handle in (kept, put, apart):
        scheduler.release(handle)
        with pytest.raises(errors.HandleLostError, match="was released"):
            other.call("total", handle)


# --- encryption and addresses ---------------------------------------------------------------------


def test_channel_unix_socket_or_tls(
    scheduler: Scheduler, role: str, far: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = _socket(far)
    assert isinstance(connection, ssl.SSLSocket)
    assert connection.version() == "TLSv1.3"
    near = _counter(scheduler, f"{role}-near")
    assert _socket(near).family == socket.AF_UNIX
    monkeypatch.setattr(SEGMENTS, False)
    monkeypatch.setenv("HELMSMAN_TLS", "0")
    with RayScheduler() as without_tls:
        plain = _counter(without_tls, "plain")
        assert plain.call("add") == 1
        assert not isinstance(_socket(plain), ssl.SSLSocket)
        assert _socket(plain).family == socket.AF_INET


def test_channel_falls_back_to_tls(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two network namespaces, the kernel keeps abstract sockets apart."""

    async def refused(path: str, limit_s: float) -> None:
        raise ConnectionRefusedError(path)

    monkeypatch.setattr("helmsman._wire.auth.open_unix", refused)
    engine = _counter(scheduler, role)
    assert isinstance(_socket(engine), ssl.SSLSocket)
    assert [engine.call("add") for _ in range(3)] == [1, 2, 3]
    value = torch.arange(1 << 21, dtype=torch.uint8)
    assert torch.equal(engine.call("echo", value), value)


def test_channel_start_error_names_address(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall between script and worker drops packets."""

    async def dropped(address: tuple[str, int], limit_s: float) -> None:
        raise TimeoutError(f"no connection within {limit_s:g} s")

    monkeypatch.setattr(SEGMENTS, False)
    monkeypatch.setattr("helmsman._wire.auth.open_tcp", dropped)
    with pytest.raises(errors.WorkerStartError) as caught:
        scheduler.create_workers(Job(role=role))
    address = r"\d+\.\d+\.\d+\.\d+"
    assert re.search(
        rf"this process on {address} cannot connect to it at {address}, TCP port \d+: no "
        r"connection within 3 s\. "
        rf"Open this port from {address} to {address}, or set HELMSMAN_PORT_RANGE",
        caught.value.reason,
    )


class _Redirected(socket.socket):
    """Connects to the first worker whenever a Unix socket of a worker is meant."""

    first = ""

    def connect(self, address: Any) -> None:
        if isinstance(address, str) and address.startswith("\0helmsman-"):
            _Redirected.first = address = _Redirected.first or address
        super().connect(address)


def test_channel_redirected_connection(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker accepts no connection that an attacker has led to it from another worker."""
    monkeypatch.setattr(socket, "socket", _Redirected)
    workers = scheduler.create_workers(Job(role=role, replicas=2))
    engines = [Engine.create(scheduler, worker, Counter) for worker in workers]
    assert _Redirected.first
    assert len({engine.call("pid") for engine in engines}) == 2


# --- health, which the worker's observer answers --------------------------------------------------


def _observed(engine: Engine) -> WorkerHealth:
    health = asyncio.run(engine.scheduler.check_health(engine.worker_id))
    assert not health.answered
    return health


def test_health_of_held_interpreter(far: Engine, gate: Gate) -> None:
    future = far.begin("hold_interpreter", *gate.files)
    gate.wait_started()
    try:
        wait_until(lambda: (_observed(far).stuck_s or 0.0) > 1.0, "the interpreter is stuck")
        assert _observed(far).running == f"{far.name}.hold_interpreter"
    finally:
        release_interpreter(gate.started)
    future.result(LIMIT_S)


def test_health_of_stopped_worker(far: Engine) -> None:
    pid = far.call("pid")
    stop(pid)
    try:
        health = _observed(far)
        assert (health.process_state, health.pid, health.is_busy) == ("stopped", pid, False)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert far.call("add") == 1
