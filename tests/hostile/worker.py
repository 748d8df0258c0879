"""A worker's channel in a process of its own, and messages of a controller.

python -m tests.hostile.worker KEY MODE
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil

from helmsman._process.pulse import Pulse
from helmsman._wire.codec import encode
from helmsman._wire.messages import Request, Verb, WorkerIdentity
from helmsman._wire.session import Session
from helmsman._wire.tls import server_tls
from helmsman._wire.wire import Outgoing
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from helmsman.rpc_server._server import channel
from tests.contract.helpers import ROOT

TAG = "run/target/0"
"""Tag of the worker's pulse."""


class Worker:
    """A running worker.

    Args:
        folder: Folder of its log.
        mode: "tls" and "plain" listen on TCP, "unix" on an abstract Unix socket.
    """

    def __init__(self, folder: Path, mode: str) -> None:
        self.key = secrets.token_bytes(32)
        self.mode = mode
        self.log = folder / f"worker-{secrets.token_hex(4)}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.worker", self.key.hex(), mode],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
        assert self.process.stdout is not None
        self.address: Any = msgspec.json.decode(
            self.process.stdout.readline(), type=str | tuple[str, int]
        )

    @property
    def num_threads(self) -> int:
        """Number of threads of its process."""
        return psutil.Process(self.process.pid).num_threads()

    def end(self) -> str:
        """End it gracefully, and return its log."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30.0)
        return self.log.read_text()

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def mark(path: str) -> None:
    """Add a line to a file."""
    with open(path, "a") as file:
        file.write("executed\n")


class Mark:
    """Adds a line to a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return mark, (str(self.path),)


def request(request_id: int, target: Path) -> Outgoing:
    """Return a request that adds a line to ``target`` when the worker executes it."""
    return Outgoing(Request(request_id, Verb.RELEASE), encode((Mark(target),)))


def request_frame(request_id: int, target: Path) -> bytes:
    """Return the bytes of such a request on a plain connection."""
    return Session().keep(request(request_id, target).body())


def serve(key: bytes, mode: str) -> None:
    """Serve until standard input ends."""
    identity = WorkerIdentity(
        run_id="run", worker_id="target/0", role="target", rank=0, node="127.0.0.1"
    )
    host = EngineHost(identity, SegmentStore(), seeding=False, pulse=Pulse(TAG))
    listener = channel.listen_abstract() if mode == "unix" else channel.listen_tcp("127.0.0.1")
    name = listener.getsockname()
    tls = server_tls() if mode == "tls" else None
    server = channel.ChannelServer(listener, key, host, shares_memory=mode == "unix", tls=tls)
    server.start()
    print(msgspec.json.encode(name.decode() if mode == "unix" else name).decode(), flush=True)
    sys.stdin.read()
    server.close()
    host.close()


if __name__ == "__main__":
    serve(bytes.fromhex(sys.argv[1]), sys.argv[2])
