"""The connection to a worker: lost and restored while each call has one outcome, encrypted between
machines.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import socket
import ssl
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, WorkerState
from helmsman.controller._aio.event_loop import background_loop
from helmsman.controller._transport import channel as channel_module
from helmsman.controller._transport.channel import Channel
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine, Gate, stop, wait_until

pytestmark = pytest.mark.not_on("inline", "no connection lies between script and worker")
only_ray = pytest.mark.not_on("local", "all its workers share memory with the script")


def _channel(engine: Engine) -> Channel:
    channel = engine.scheduler._roles.client(engine.worker_id).transport  # type: ignore[attr-defined]
    assert isinstance(channel, Channel)
    return channel


def _socket(engine: Engine) -> socket.socket:
    sock = _channel(engine)._socket
    assert sock is not None
    return sock


def _on_loop(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on the controller's loop."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    background_loop().call_soon_threadsafe(lambda: done.set_result(function(*args)))
    return done.result(LIMIT_S)


def _end(sock: socket.socket, kind: str) -> None:
    """End a connection; with a reset the bytes that the other side has not read yet are lost."""
    if kind == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif kind == "shutdown":
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _cut(engine: Engine, kind: str) -> None:
    """Lose the connection and wait until another has replaced it."""
    channel, sock = _channel(engine), _socket(engine)

    def cut() -> None:
        _end(sock, kind)
        if kind != "shutdown":
            channel._drop(sock)

    _on_loop(cut)
    wait_until(lambda: channel._socket not in (None, sock), "the connection is restored")


CUTS = pytest.mark.parametrize("kind", ["close", "reset", "shutdown"])


@CUTS
def test_channel_cut_during_calls(own: Engine, gate: Gate, kind: str) -> None:
    waiting = own.begin("wait", *gate.files)
    gate.wait_started()
    queued = [own.begin("add", 10) for _ in range(3)]
    _cut(own, kind)
    later = own.begin("add", 100)
    gate.open()
    assert waiting.result(LIMIT_S) == 1
    assert [each.result(LIMIT_S) for each in queued] == [11, 21, 31]
    assert later.result(LIMIT_S) == 131
    assert own.call("add", 0) == 131, "nothing ran twice"
    assert own.scheduler.status()[-1].state is WorkerState.READY


@CUTS
def test_channel_cut_before_requests_read(own: Engine, kind: str) -> None:
    channel, pid = _channel(own), own.call("pid")
    stop(pid)
    try:
        unread = [own.begin("add") for _ in range(5)]
        wait_until(lambda: len(channel._awaited) == 5, "they are written")
        sock = _socket(own)
        _on_loop(_end, sock, kind)
        _on_loop(channel._drop, sock)
        written_to_none = own.begin("add")
        wait_until(lambda: len(channel._awaited) == 6, "it is posted")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [each.result(LIMIT_S) for each in (*unread, written_to_none)] == [1, 2, 3, 4, 5, 6]
    assert own.call("add", 0) == 6


@pytest.mark.parametrize(
    ("kind", "num_bytes"), [("close", 0), ("shutdown", 1 << 10), ("reset", 1 << 21)]
)
def test_channel_cut_before_replies_read(
    own: Engine, tmp_path: Path, kind: str, num_bytes: int
) -> None:
    channel, sock = _channel(own), _socket(own)
    loop = background_loop()
    _on_loop(loop.remove_reader, sock)
    calls = [own.begin("add"), own.begin("make", num_bytes)]
    marked = tmp_path / "executed"
    calls.append(own.begin("apply", os.mkdir, str(marked)))
    wait_until(marked.exists, "all are executed")

    def cut() -> None:
        _end(sock, kind)
        channel._drop(sock)

    _on_loop(cut)
    assert calls[0].result(LIMIT_S) == 1
    assert calls[1].result(LIMIT_S).sum() == 7 * num_bytes
    assert calls[2].result(LIMIT_S) is None
    assert own.call("add") == 2


def test_channel_cut_repeatedly(own: Engine) -> None:
    calls = []
    for _ in range(5):
        calls += [own.begin("add") for _ in range(20)]
        _cut(own, "reset")
    assert sorted(each.result(LIMIT_S) for each in calls) == list(range(1, 101))
    assert own.call("add", 0) == 100


def test_channel_not_restored_fails_worker(
    own: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused() -> socket.socket:
        raise TimeoutError("no connection within 3 s")

    pid = own.call("pid")
    monkeypatch.setattr(channel_module, "RECONNECT_S", 0.2)
    waiting = own.begin("wait", *gate.files)
    gate.wait_started()
    channel, sock = _channel(own), _socket(own)
    channel._connector.connect = refused
    _on_loop(channel._drop, sock)
    with pytest.raises(
        errors.WorkerFailedError,
        match="connection was lost and could not be restored within 0.2 s: no conn",
    ) as lost:
        waiting.result(LIMIT_S)
    assert lost.value.pid == pid
    with pytest.raises(
        errors.WorkerFailedError, match="was ended by this scheduler: its connection was lost"
    ):
        own.call("add")
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "its process has ended")


def test_channel_drops_confirmed_frames(own: Engine) -> None:
    for _ in range(300):
        own.call("add")
    assert not _channel(own)._awaited
    assert len(_channel(own)._session._kept) <= 1
    value = torch.arange(1 << 18, dtype=torch.uint8)
    assert torch.equal(own.call("echo", value), value)
    assert len(_channel(own)._session._kept) <= 1


def test_channel_order_of_all_sizes(own: Engine) -> None:
    """Between machines large arguments go through the object store, small ones by the
    connection.
    """
    sizes = [0, 1 << 21, 0, 1 << 10, 1 << 22, 0, 1 << 15, 0]
    calls = [
        own.begin("note_number", index, torch.zeros(size, dtype=torch.uint8))
        for index, size in enumerate(sizes)
    ]
    for call in calls:
        call.result(LIMIT_S)
    assert own.call("numbers") == list(range(len(sizes)))


def test_channel_results_of_all_sizes(own: Engine) -> None:
    for size in (0, 1 << 10, (1 << 20) - 4096, 1 << 20, 1 << 23):
        value = torch.arange(size, dtype=torch.uint8)
        assert torch.equal(own.call("echo", value), value)
        assert _channel(own).is_open


def test_channel_unix_socket_or_tls(backend: str, engine: Engine, own: Engine) -> None:
    assert _channel(engine).shares_memory
    assert _socket(engine).family == socket.AF_UNIX
    if backend == "ray":
        connection = _socket(own)
        assert not _channel(own).shares_memory
        assert isinstance(connection, ssl.SSLSocket)
        assert connection.version() == "TLSv1.3"


@only_ray
def test_channel_without_tls(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HELMSMAN_TLS=0, which a scheduler reads when it is made."""
    monkeypatch.setattr(scheduler._backend, "_tls", False)  # type: ignore[attr-defined]
    monkeypatch.setattr("helmsman.controller._ray_backend.transport.HAS_SEGMENTS", False)
    scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, f"{role}/0", Counter)
    assert engine.call("add") == 1
    assert not isinstance(_socket(engine), ssl.SSLSocket)
    assert _socket(engine).family == socket.AF_INET


@only_ray
@pytest.mark.parametrize("tls", [True, False])
def test_channel_start_error_names_address(
    scheduler: Scheduler, role: str, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a firewall lies between script and worker."""

    async def dropped(address: tuple[str, int], limit_s: float) -> None:
        raise TimeoutError(f"no connection within {limit_s:g} s")

    monkeypatch.setattr(scheduler._backend, "_tls", tls)  # type: ignore[attr-defined]
    monkeypatch.setattr("helmsman.controller._ray_backend.transport.HAS_SEGMENTS", False)
    monkeypatch.setattr("helmsman.rpc_server._wire.auth.open_tcp", dropped)
    with pytest.raises(errors.WorkerStartError) as caught:
        scheduler.create_workers(Job(role=role))
    address = r"\d+\.\d+\.\d+\.\d+"
    assert re.search(
        rf"this process on {address} cannot connect to it at {address}, TCP port \d+: no "
        r"connection within 3 s\. "
        rf"Open this port from {address} to {address}, or set HELMSMAN_PORT_RANGE",
        caught.value.reason,
    )


@only_ray
def test_channel_falls_back_to_tls(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where worker and script are in two network namespaces, whose abstract sockets the kernel
    keeps apart.
    """

    async def refused(path: str, limit_s: float) -> None:
        raise ConnectionRefusedError(path)

    monkeypatch.setattr("helmsman.rpc_server._wire.auth.open_unix", refused)
    scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, f"{role}/0", Counter)
    assert isinstance(_socket(engine), ssl.SSLSocket)
    assert [engine.call("add") for _ in range(3)] == [1, 2, 3]
    value = torch.arange(1 << 21, dtype=torch.uint8)
    assert torch.equal(engine.call("echo", value), value)


@only_ray
def test_kept_results_reach_other_machines(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in a segment until a worker that cannot map that wants it."""
    scheduler.create_workers(Job(role=f"{role}-near", replicas=2))
    near, neighbour = (
        Engine.create(scheduler, f"{role}-near/{index}", Counter) for index in range(2)
    )
    monkeypatch.setattr("helmsman.controller._ray_backend.transport.HAS_SEGMENTS", False)
    scheduler.create_workers(Job(role=f"{role}-far", replicas=2))
    far = [Engine.create(scheduler, f"{role}-far/{index}", Counter) for index in range(2)]
    kept = scheduler.call_engine(
        near.worker_id, "make", near.name, 1 << 20, rpc_meta={"keep": True}
    )
    put = scheduler.put(torch.full((1 << 20,), 3))
    apart = scheduler.call_engine(
        far[0].worker_id, "make", far[0].name, 1 << 10, rpc_meta={"keep": True}
    )
    for engine in (neighbour, *far, near, far[0]):
        assert engine.call("total", kept, put, apart) == (7 << 20) + (3 << 20) + (7 << 10)
    assert scheduler.get(kept).sum() == 7 << 20
    for handle in (kept, put, apart):
        scheduler.release(handle)
        with pytest.raises(errors.HandleLostError, match="was released"):
            far[1].call("total", handle)


class _Redirected(socket.socket):
    """Connections to Unix sockets of workers all go to the first of them."""

    first = ""

    def connect(self, address: Any) -> None:
        if isinstance(address, str) and address.startswith("\0helmsman-"):
            _Redirected.first = address = _Redirected.first or address
        super().connect(address)


@only_ray
def test_channel_redirected_connection(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attacker leads connections astray: each worker answers only to those that are meant for
    it.
    """
    monkeypatch.setattr(socket, "socket", _Redirected)
    workers = scheduler.create_workers(Job(role=role, replicas=2))
    engines = [Engine.create(scheduler, worker, Counter) for worker in workers]
    assert _Redirected.first
    assert len({engine.call("pid") for engine in engines}) == 2
