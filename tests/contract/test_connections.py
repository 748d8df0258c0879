"""The connection to a worker: if it is lost, it is restored, and each call has one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import WorkerState
from tests.contract.helpers import LIMIT_S, Engine, Gate, stop, wait_until
from tests.contract.marks import needs_processes, ray_smoke

pytestmark = needs_processes


Connect = Callable[[], socket.socket]


def _unix_sockets() -> Iterator[socket.socket]:
    """Yield copies of the connected Unix sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        # The descriptor may be no connected socket, or be closed meanwhile.
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(int(name))) as copy,
        ):
            copy.getpeername()
            if copy.family == socket.AF_UNIX:
                yield copy


def _cut(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def _address_for(pid: int, *, cut: bool = False) -> Any:
    """In a worker: return the address to which a process is connected; maybe cut the connection."""
    for each in _unix_sockets():
        peer = each.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if each.getsockname() and struct.unpack("3i", peer)[0] == pid:
            if cut:
                _cut(each)
            return each.getsockname()
    raise LookupError(f"no process {pid} is connected")


@pytest.fixture
def connected(own: Engine) -> Connect:
    """Return a copy of the script's end of the present connection to the worker of `own`."""
    address = own.call("apply", _address_for, os.getpid())

    def find() -> socket.socket | None:
        for each in _unix_sockets():
            if each.getpeername() == address and _is_open(each):
                return each.dup()
        return None

    return lambda: wait_until(find, "the connection is open")


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True


@ray_smoke
def test_connection_cut_during_calls(own: Engine, gate: Gate, connected: Connect) -> None:
    waiting = own.begin("wait", *gate.files)
    gate.wait_started()
    calls = []
    for _ in range(3):
        calls += [own.begin("add") for _ in range(20)]
        with connected() as connection:
            _cut(connection)
    gate.open()
    assert waiting.result(LIMIT_S) == 1
    assert [each.result(LIMIT_S) for each in calls] == list(range(2, 62))
    assert own.call("add", 0) == 61, "no call ran twice"
    assert own.state is WorkerState.READY


@ray_smoke
def test_connection_cut_before_requests_read(own: Engine, connected: Connect) -> None:
    calls = []
    with connected() as connection:
        stop(own.call("pid"))
        for _ in range(5):
            unread = _num_unread(connection)
            calls.append(own.begin("add"))
            wait_until(lambda: _num_unread(connection) > unread, "the request is written")  # noqa: B023
        _cut(connection)
    calls.append(own.begin("add"))
    os.kill(asyncio.run(own.scheduler.check_health(own.worker_id)).pid, signal.SIGCONT)
    assert [each.result(LIMIT_S) for each in calls] == [1, 2, 3, 4, 5, 6]
    assert own.call("add", 0) == 6


def _num_unread(connection: socket.socket) -> int:
    """Return the bytes that the other end has not read."""
    found = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return int(struct.unpack("i", found)[0])


@ray_smoke
def test_connection_cut_before_reply(own: Engine, tmp_path: Path) -> None:
    for num_bytes in (0, 1 << 10, 1 << 21):
        folder = str(tmp_path / str(num_bytes))
        assert own.call("apply", _make_once, folder, num_bytes, os.getpid()) == bytes(num_bytes)
    assert own.call("add") == 1


def _make_once(folder: str, num_bytes: int, pid: int) -> bytes:
    os.mkdir(folder)  # raises if the call runs twice
    _address_for(pid, cut=True)
    return bytes(num_bytes)


def test_connection_survives_unencodable_name(own: Engine) -> None:
    for method in ("\ud800", "add\udfff"):
        with pytest.raises(
            errors.ProtocolError,
            match="cannot be encoded: .*surrogates not allowed. Nothing was sent",
        ):
            own.call(method)
        with pytest.raises(errors.ProtocolError, match="cannot be encoded"):
            asyncio.run(own.acall(method))
    assert own.call("add") == 1
