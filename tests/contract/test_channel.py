"""The direct connection to a worker on Ray: faster, and lost without a loss."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import struct

import pytest
import torch

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, WorkerState
from helmsman.controller._aio.event_loop import background_loop
from helmsman.controller._transport.channel import Channel
from helmsman.rpc_server._wire.frames import pack_length
from tests.contract.engines import Counter
from tests.contract.helpers import LIMIT_S, Engine, Gate, stop, wait_until

pytestmark = [
    pytest.mark.also_apart,
    pytest.mark.not_on("inline", "no connection lies between script and worker"),
    pytest.mark.not_on("local", "it has nothing but its connection"),
]


@pytest.fixture
def own(scheduler: Scheduler, role: str) -> Engine:
    """A Counter in a worker of this test alone."""
    scheduler.create_workers(Job(role=role))
    return Engine.create(scheduler, f"{role}/0", Counter)


def _channel(engine: Engine) -> Channel:
    channel = engine.scheduler._roles.client(engine.worker_id).transport._channel  # type: ignore[attr-defined]
    assert isinstance(channel, Channel)
    return channel


def _cut(channel: Channel, *, reset: bool) -> None:
    """End the connection, as a network does; with a reset what the other side has not read yet is lost."""

    def cut() -> None:
        if reset:
            channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        channel.close()

    background_loop().call_soon_threadsafe(cut)


@pytest.mark.parametrize("reset", [False, True])
def test_a_call_under_way_is_answered_once_although_its_connection_is_lost(own: Engine, gate: Gate, reset: bool) -> None:
    waiting = own.begin("wait", *gate.files)
    gate.wait_started()
    queued = [own.begin("add", 10) for _ in range(3)]
    _cut(_channel(own), reset=reset)
    wait_until(lambda: not _channel(own).is_open, "the connection is known to be lost")
    later = own.begin("add", 100)
    gate.open()
    assert waiting.result(LIMIT_S) == 1
    assert [each.result(LIMIT_S) for each in queued] == [11, 21, 31]
    assert later.result(LIMIT_S) == 131
    assert own.call("add", 0) == 131, "nothing ran twice"
    assert own.scheduler.status()[-1].state is WorkerState.READY


@pytest.mark.parametrize("reset", [False, True])
def test_a_request_that_may_not_have_arrived_runs_once(own: Engine, reset: bool) -> None:
    pid = own.call("pid")
    stop(pid)
    try:
        unread = [own.begin("add") for _ in range(5)]
        wait_until(lambda: len(_channel(own)._posted) == 5, "they are written")
        _cut(_channel(own), reset=reset)
        wait_until(lambda: not _channel(own).is_open, "the connection is known to be lost")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [each.result(LIMIT_S) for each in unread] == [1, 2, 3, 4, 5]
    assert own.call("add", 0) == 5


def test_calls_of_all_sizes_keep_their_order(own: Engine) -> None:
    """Large arguments go through the object store, small ones by the connection."""
    sizes = [0, 1 << 21, 0, 1 << 10, 1 << 22, 0, 1 << 15, 0]
    calls = [own.begin("note_number", index, torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]
    for call in calls:
        call.result(LIMIT_S)
    assert own.call("numbers") == list(range(len(sizes)))


@pytest.mark.parametrize("size", [0, 1 << 10, (1 << 20) - 4096, 1 << 20, 1 << 23])
def test_results_of_all_sizes(own: Engine, size: int) -> None:
    value = torch.arange(size, dtype=torch.uint8)
    assert torch.equal(own.call("echo", value), value)
    assert _channel(own).is_open


def test_the_worker_forgets_what_has_been_answered(own: Engine) -> None:
    for _ in range(50):
        own.call("add")
    assert not _channel(own)._posted


def test_channel_is_unix_socket_on_one_machine_and_tls_between_machines(own: Engine, variant: str) -> None:
    connection = _channel(own)._socket
    if variant == "ray":
        assert connection.family == socket.AF_UNIX
        assert connection.getpeername().startswith(b"\0helmsman-"), "nothing of it is in a file system"
    else:
        assert isinstance(connection, ssl.SSLSocket)
        assert connection.version() == "TLSv1.3"


def test_channel_without_tls(scheduler: Scheduler, role: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """HELMSMAN_TLS=0, which a scheduler reads when it is made."""
    monkeypatch.setattr(scheduler._backend, "_tls", False)  # type: ignore[attr-defined]
    scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, f"{role}/0", Counter)
    assert engine.call("add") == 1
    connection = _channel(engine)._socket
    assert not isinstance(connection, ssl.SSLSocket)
    assert connection.family == (socket.AF_UNIX if variant == "ray" else socket.AF_INET)


def test_channel_falls_back_to_tls_where_unix_socket_cannot_be_reached(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where worker and script are in two network namespaces, whose abstract sockets the kernel keeps apart."""

    async def refused(path: str, limit_s: float) -> None:
        raise ConnectionRefusedError(path)

    monkeypatch.setattr("helmsman.rpc_server._wire.auth.open_unix", refused)
    scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, f"{role}/0", Counter)
    assert isinstance(_channel(engine)._socket, ssl.SSLSocket)
    assert [engine.call("add") for _ in range(3)] == [1, 2, 3]
    value = torch.arange(1 << 21, dtype=torch.uint8)
    assert torch.equal(engine.call("echo", value), value)


def test_a_stranger_gets_nothing_and_disturbs_nobody(own: Engine) -> None:
    connection = _channel(own)._socket
    with socket.socket(connection.family, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(LIMIT_S)
        stranger.connect(connection.getpeername())
        nonsense = b"\x80\x05nonsense"
        stranger.sendall(pack_length(len(nonsense)) + nonsense)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 16):
                pass  # the greeting, and then the end
    assert own.call("add") == 1


def test_without_it_calls_go_by_way_of_ray(backend: str, own: Engine, gate: Gate) -> None:
    """As where a firewall lets nothing but Ray through."""
    _cut(_channel(own), reset=False)
    wait_until(lambda: not _channel(own).is_open, "the connection is known to be lost")
    assert [own.call("add") for _ in range(3)] == [1, 2, 3]
    waiting = own.begin("wait", *gate.files)
    gate.wait_started()
    health = own.scheduler.status()
    assert any(status.health is not None and str(status.health.running).endswith("wait") for status in health)
    gate.open()
    assert waiting.result(LIMIT_S) == 4


def test_what_is_kept_on_one_machine_reaches_workers_of_others(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in a segment until a worker that cannot map that wants it."""
    scheduler.create_workers(Job(role=f"{role}-near", replicas=2))
    near, neighbour = (Engine.create(scheduler, f"{role}-near/{index}", Counter) for index in range(2))
    monkeypatch.setattr("helmsman.controller._ray_backend.transport.HAS_SEGMENTS", False)
    scheduler.create_workers(Job(role=f"{role}-far", replicas=2))
    far = [Engine.create(scheduler, f"{role}-far/{index}", Counter) for index in range(2)]
    kept = scheduler.call_engine(near.worker_id, "make", near.name, 1 << 20, rpc_meta={"keep": True})
    put = scheduler.put(torch.full((1 << 20,), 3))
    apart = scheduler.call_engine(far[0].worker_id, "make", far[0].name, 1 << 10, rpc_meta={"keep": True})
    for engine in (neighbour, *far, near, far[0]):
        assert engine.call("total", kept, put, apart) == (7 << 20) + (3 << 20) + (7 << 10)
    assert scheduler.get(kept).sum() == 7 << 20
    for handle in (kept, put, apart):
        scheduler.release(handle)
        with pytest.raises(errors.HandleLostError, match="was released"):
            far[1].call("total", handle)
