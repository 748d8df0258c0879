"""A guard of AReaL's kind: it leases ports and starts children for its script, over HTTP.

Children run in a shell's pipeline, or in a session of their own when the request has "detached".
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from typing import Any

import psutil

from tests.compat.areal.service import ADDRESS, Handler, options

children: dict[tuple[str, int], subprocess.Popen[bytes]] = {}


def alloc_ports(given: dict[str, Any]) -> dict[str, Any]:
    sockets = [socket.create_server((ADDRESS, 0)) for _ in range(given["count"])]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return {"status": "success", "ports": ports, "host": ADDRESS}


def fork(given: dict[str, Any]) -> dict[str, Any]:
    detached = bool(given.get("detached"))
    child = subprocess.Popen(
        shlex.join(given["raw_cmd"]) + ("" if detached else " 2>&1 | cat"),
        shell=True,
        executable="/bin/bash",
        env={**os.environ, **given.get("env", {})},
        start_new_session=detached,
    )
    children[given["role"], given["worker_index"]] = child
    return {"status": "success", "host": ADDRESS, "pid": child.pid}


def kill_forked_worker(given: dict[str, Any]) -> dict[str, Any]:
    child = children.pop((given["role"], given["worker_index"]))
    tree = psutil.Process(child.pid).children(recursive=True)
    for each in [*tree, psutil.Process(child.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another one
            each.terminate()
    child.wait()
    return {"status": "success"}


def set_env(given: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(given["env"])
    return {"status": "success"}


class Guard(Handler):
    """Routes the requests of a script."""

    def do_POST(self) -> None:  # noqa: N802
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        routes = {
            "/alloc_ports": alloc_ports,
            "/fork": fork,
            "/kill_forked_worker": kill_forked_worker,
            "/set_env": set_env,
            "/configure": lambda _: {"status": "ok"},
        }
        self.answer(200, routes[self.path](given))


if __name__ == "__main__":
    given = options()
    server = ThreadingHTTPServer((given.host, given.port), Guard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.sigwait({signal.SIGTERM})
    for child in children.values():
        child.terminate()
    sys.exit(0)
