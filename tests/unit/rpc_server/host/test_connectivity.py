"""Tests of the connection probes between ranks: Listener and reach."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from helmsman.rpc_server._host.connectivity import PortListener, reach


@pytest.fixture
def listener() -> Iterator[PortListener]:
    made = PortListener()
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
    listener: PortListener, address: str, proof: bytes, outcome: str
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


def test_reach_beside_silent_peers(listener: PortListener) -> None:
    port = free_port()
    assert listener.listen(port, b"proof", 30.0) == ""
    with contextlib.ExitStack() as silent:
        for _ in range(300):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert [reach("127.0.0.1", port, b"proof", 10.0) for _ in range(10)] == [""] * 10


def test_reach_by_many_at_once_leaves_the_port_free(listener: PortListener) -> None:
    port = free_port()
    assert listener.listen(port, b"proof", 30.0) == ""
    outcomes: list[str] = []
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
        # This socket lacks SO_REUSEADDR, so a lingering connection would block the port.
        plain.bind(("127.0.0.1", port))
