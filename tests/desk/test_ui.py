"""Test that the web page of a run needs its token."""

from __future__ import annotations

import http.client

from helmsman._desk.ui import Server
from tests.desk.served_page import served

__all__ = ["served"]


def status(server: Server, path: str, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    with connection.getresponse() as answer:
        answer.read()
        return answer.status


def test_page_needs_token(served: Server) -> None:
    bearer = f"Bearer {served.token}"
    assert status(served, f"/?token={served.token}") == 200
    assert status(served, "/api/state", Authorization=bearer) == 200
    assert status(served, "/api/worker?id=rollout/9", Authorization=bearer) == 404
    assert status(served, "/other", Authorization=bearer) == 404
    for path in ("/", "/api/state", "/api/worker?id=rollout/0", "/?token=", "/?token=wrong"):
        assert status(served, path) == 403
        assert status(served, path, Authorization="Bearer wrong") == 403
    for host in ("evil.example", f"evil.example:{served.server_port}", "127.0.0.1:1"):
        assert status(served, "/api/state", Authorization=bearer, Host=host) == 403
    assert served.server_address[0] == "127.0.0.1"
