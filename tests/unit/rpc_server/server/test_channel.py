"""Tests that a worker's channel listens on a free port of a range."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from helmsman.rpc_server._server.channel import listen_tcp


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port at which another socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_listen_tcp_free_port_of_range(busy_port: int) -> None:
    with listen_tcp("127.0.0.1", range(busy_port, busy_port + 50)) as first:
        port = first.getsockname()[1]
        assert busy_port < port < busy_port + 50


def test_listen_tcp_without_free_port(busy_port: int) -> None:
    expected = (
        f"none of the ports {busy_port}-{busy_port} of 127.0.0.1 is free .* set "
        "HELMSMAN_PORT_RANGE to a wider range"
    )
    with pytest.raises(OSError, match=expected):
        listen_tcp("127.0.0.1", range(busy_port, busy_port + 1))
