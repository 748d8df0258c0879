"""Test that a peer that leaves before its answer costs the operator's HTTP server no traceback."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import pytest

from helmsman._desk.connections import TokenServer


def test_peer_leaves_before_its_answer(capfd: pytest.CaptureFixture[str]) -> None:
    has_asked, has_left, has_ended = (threading.Event() for _ in range(3))

    def answer(path: str, values: dict[str, list[str]]) -> tuple[str, bytes]:
        has_asked.set()
        assert has_left.wait(30.0)
        return "text/plain", bytes(1 << 24)

    class Server(TokenServer):
        def shutdown_request(self, request: Any) -> None:
            super().shutdown_request(request)
            has_ended.set()

    with Server("127.0.0.1", 0, "/", answer, command="helmsman ui") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with socket.create_connection(("127.0.0.1", server.server_port)) as peer:
                # Closing resets the connection.
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                peer.sendall(f"GET /?token={server.token} HTTP/1.1\r\n\r\n".encode())
                assert has_asked.wait(30.0)
            has_left.set()
            assert has_ended.wait(30.0)
        finally:
            server.shutdown()
    assert "Traceback" not in capfd.readouterr().err
