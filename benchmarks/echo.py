"""A process that answers at once, as the peer of floors and of simulated workers.

It speaks the local transport's protocol, so the controller's own code can talk to it, and serves
all connections in one thread.

python -m benchmarks.echo PATH KEY
"""

from __future__ import annotations

import asyncio
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

import msgspec

from helmsman._wire.auth import authenticate_connector, connect
from helmsman._wire.codec import encode
from helmsman._wire.messages import Reply, Request, Verb
from helmsman._wire.session import HELLO, WELCOME, Session
from helmsman._wire.stream import Stream
from helmsman._wire.wire import (
    FrameReader,
    ReplyFrame,
    RequestFrame,
    WirePayload,
    decode_reply,
    decode_request,
    encode_frame,
    pack_length,
    to_wire,
)
from helmsman.api.scheduler import WorkerHealth

_HEALTH = WorkerHealth(
    worker_id="simulated/0",
    pid=1,
    node="127.0.0.1",
    engines={"engine": "Engine"},
    cpu_s=1.5,
    rss_bytes=1 << 28,
)


def _wire(value: Any) -> WirePayload:
    return to_wire(encode(value))[0]


_ANSWERS = {
    Verb.HEALTH: _wire(msgspec.msgpack.encode(_HEALTH)),
    Verb.LEASE_PORTS: _wire([20000]),
    Verb.DESTROY: _wire(([], [])),  # problems, engines that are not destroyed
}
_NOTHING = _wire(None)


class EchoProcess:
    """The process, as a context manager. Clients connect to ``path`` with ``key``."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        self._folder = Path(tempfile.mkdtemp(prefix="helmsman-echo-"))
        self.path = str(self._folder / "sock")

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.echo", self.path, self.key.hex()]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
            env=os.environ | _search_path(),
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # the process listens
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def connect(self) -> BareConnection:
        """Open a bare connection."""
        return BareConnection(asyncio.run(connect(self.path, self.key, 10.0)))


class BareConnection:
    """A connection for a request and its reply."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.sendall(pack_length(HELLO.size) + HELLO.pack(bytes(16), 0, 0))
        sock.recv(65536)
        self._socket = sock
        self._session = Session()
        self._frame = RequestFrame(Request(1, Verb.CALL, "engine", "ping"), _wire(((), {})))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self) -> None:
        """Send the request."""
        self._socket.sendall(self._session.keep(encode_frame(self._frame)))

    def receive(self) -> ReplyFrame:
        """Return the reply, which fits into one read."""
        body = self._session.take(self._socket.recv(65536)[4:])
        self._session.taken(len(body), None)
        return decode_reply(body)


def _search_path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class _Peer:
    """A connection with its received bytes and its session."""

    def __init__(self) -> None:
        self.reader = FrameReader()
        self.session: Session | None = None


def serve(path: str, key: bytes) -> None:
    """Answer until standard input ends, at the end of the parent process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(1024)
    print("listening", flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for ready, _ in selector.select():
                if ready.fileobj is sys.stdin:
                    return
                if ready.fileobj is listener:
                    peer, _ = listener.accept()
                    asyncio.run(authenticate_connector(Stream(peer), key))
                    peer.setblocking(True)
                    selector.register(peer, selectors.EVENT_READ, _Peer())
                else:
                    assert isinstance(ready.fileobj, socket.socket)
                    if not _answer(ready.fileobj, ready.data):
                        selector.unregister(ready.fileobj)
                        ready.fileobj.close()


def _answer(sock: socket.socket, peer: _Peer) -> bool:
    """Answer the received requests; False when the connection has ended."""
    try:
        data = sock.recv(1 << 18)
        answers = []
        for message in peer.reader.feed(data):
            if peer.session is None:
                peer.session = Session()
                answers.append(pack_length(WELCOME.size) + WELCOME.pack(0))
            elif body := peer.session.take(message):
                request = decode_request(body).request
                peer.session.taken(len(body), None)
                frame = ReplyFrame(Reply(request.id, True), _ANSWERS.get(request.verb, _NOTHING))
                answers.append(peer.session.keep(encode_frame(frame)))
        sock.sendall(b"".join(answers))
    except ConnectionError:
        return False
    return bool(data)


if __name__ == "__main__":
    serve(sys.argv[1], bytes.fromhex(sys.argv[2]))
