"""Other users reach nothing of a run; malformed queries end only their own connection."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helmsman import InlineScheduler, Job
from helmsman.controller._node.control_socket import Query, ask
from helmsman.controller._node.run_registry import record_places

CONNECT = """
import os, socket, sys
folder = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
os.setgid(65534); os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
try:
    peer.connect(f"/proc/self/fd/{folder}/{sys.argv[2]}")
    peer.sendall(b"\\0" * 8)
    print("answered" if peer.recv(1) else "closed")
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def scheduler() -> Iterator[InlineScheduler]:
    with InlineScheduler() as scheduler:
        scheduler.create_workers(Job(role="actor"))
        yield scheduler


def socket_path(scheduler: InlineScheduler) -> Path:
    return record_places()[0].path / f"{scheduler.run_id}.sock"


def answers(scheduler: InlineScheduler) -> bool:
    return b"actor/0" in ask(scheduler.run_id, Query(kind="snapshot"))


def test_socket_is_private_and_removed(scheduler: InlineScheduler) -> None:
    path = socket_path(scheduler)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert answers(scheduler)
    scheduler.close()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        ask(scheduler.run_id, Query(kind="snapshot"))


@pytest.mark.root
def test_socket_other_user(scheduler: InlineScheduler) -> None:
    """Even with a descriptor of the directory, and with permissions that were opened up."""
    path = socket_path(scheduler)

    def outcome() -> str:
        command = [sys.executable, "-c", CONNECT, str(path.parent), path.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert outcome() == "PermissionError"
    mode = stat.S_IMODE(path.parent.stat().st_mode)
    path.chmod(0o777)
    path.parent.chmod(0o755)
    try:
        assert outcome() in ("closed", "ConnectionResetError", "BrokenPipeError")
    finally:
        path.parent.chmod(mode)
    assert answers(scheduler)


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
        peer.connect(str(socket_path(scheduler)))
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # with unread bytes
            peer.sendall(message)
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b""
    assert answers(scheduler)


def test_socket_silent_clients(scheduler: InlineScheduler) -> None:
    """More silent connections than it serves at once are dropped, and it recovers."""
    peers = []
    for _ in range(30):
        peers.append(socket.socket(socket.AF_UNIX))
        peers[-1].connect(str(socket_path(scheduler)))
    dropped = 0
    for peer in peers:
        peer.settimeout(10.0)
        dropped += peer.recv(1) == b""
        peer.close()
    assert dropped == len(peers)
    assert answers(scheduler)


def test_ask_without_socket() -> None:
    with pytest.raises(FileNotFoundError, match="no control socket of run 0123456789"):
        ask("0123456789", Query(kind="snapshot"))


@pytest.mark.root
def test_recordings_are_private(tmp_path: Path) -> None:
    from helmsman import LocalScheduler

    with LocalScheduler() as scheduler:
        scheduler.create_workers(Job(role="actor"))
        files = list(scheduler.log_dir.glob("*.events"))
        assert len(files) == 2
        assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
        assert stat.S_IMODE(scheduler.log_dir.stat().st_mode) == 0o700
