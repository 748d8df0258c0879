"""Test that many silent connections neither exhaust nor block the operator's HTTP servers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from helmsman._desk.connections import MAX_CONNECTIONS
from helmsman._desk.ui import Server
from tests.desk.served_page import served
from tests.desk.test_ui import status

__all__ = ["served"]
NUM_PEERS = 300


def test_page_beside_held_connections(served: Server) -> None:
    num_threads, num_files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as peers:
        for _ in range(NUM_PEERS):
            peers.enter_context(socket.create_connection(("127.0.0.1", served.server_port)))
        bearer = f"Bearer {served.token}"
        assert status(served, "/api/state", Authorization=bearer) == 200
        assert threading.active_count() <= num_threads + MAX_CONNECTIONS + 1
        assert len(os.listdir("/proc/self/fd")) <= num_files + NUM_PEERS + MAX_CONNECTIONS + 1
