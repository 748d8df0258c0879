"""Tests that other users cannot query a run, and malformed queries end only their connection."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from helmsman import InlineScheduler, Job
from helmsman._desk.control_socket import Query, ask

CONNECT = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
try:
    peer.connect(sys.argv[1].replace("@", "\\0", 1))
    peer.sendall(b"\\0" * 8)
    print("answered" if peer.recv(1) else "closed")
except OSError as error:
    print(type(error).__name__)
"""
LISTEN = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1].replace("@", "\\0", 1))
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def scheduler() -> Iterator[InlineScheduler]:
    with InlineScheduler() as scheduler:
        scheduler.create_workers(Job(role="actor"))
        yield scheduler


def address(run_id: str) -> str:
    return f"\0helmsman/{os.geteuid()}/{run_id}"


def answers(scheduler: InlineScheduler) -> bool:
    return b"actor/0" in ask(scheduler.run_id, Query(kind="snapshot"))


def test_socket_ends_with_scheduler(scheduler: InlineScheduler) -> None:
    assert answers(scheduler)
    scheduler.close()
    with pytest.raises(ConnectionRefusedError, match=f"run {scheduler.run_id} has no control"):
        ask(scheduler.run_id, Query(kind="snapshot"))


@pytest.mark.root
def test_socket_other_user(scheduler: InlineScheduler) -> None:
    where = address(scheduler.run_id).replace("\0", "@")
    command = [sys.executable, "-c", CONNECT, where]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert outcome in ("closed", "ConnectionResetError", "BrokenPipeError")
    assert answers(scheduler)


@pytest.mark.root
def test_socket_planted_listener() -> None:
    """A query is not sent to a socket that another user listens on."""
    command = [sys.executable, "-c", LISTEN, address("0123456789").replace("\0", "@")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as planted:
        assert planted.stdout is not None
        assert planted.stdout.readline() == "listens\n"
        with pytest.raises(PermissionError, match="belongs to another user"):
            ask("0123456789", Query(kind="snapshot"))
        planted.terminate()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0",
        struct.pack("!Q", 1 << 60),
        struct.pack("!Q", 1 << 17) + b"x" * 100,
        struct.pack("!Q", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("!Q", 1) + b"\x80",
        os.urandom(5000),
    ],
)
def test_socket_malformed_query(scheduler: InlineScheduler, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(address(scheduler.run_id))
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # with unread bytes
            peer.sendall(message)
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b""
    assert answers(scheduler)


def test_socket_silent_clients(scheduler: InlineScheduler) -> None:
    """Silent connections beyond the limit are dropped, and the socket recovers."""
    peers = []
    for _ in range(30):
        peers.append(socket.socket(socket.AF_UNIX))
        peers[-1].connect(address(scheduler.run_id))
    dropped = 0
    for peer in peers:
        peer.settimeout(10.0)
        dropped += peer.recv(1) == b""
        peer.close()
    assert dropped == len(peers)
    assert answers(scheduler)


@pytest.mark.root
def test_recordings_are_private() -> None:
    from helmsman import LocalScheduler

    with LocalScheduler(preload=()) as scheduler:
        scheduler.create_workers(Job(role="actor"))
        files = list(scheduler.log_dir.glob("*.events"))
        assert len(files) == 2
        assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
        assert stat.S_IMODE(scheduler.log_dir.stat().st_mode) == 0o700
