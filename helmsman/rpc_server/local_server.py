"""The local adapter: an EngineHost behind a Unix socket that only this user's run can talk to."""

from __future__ import annotations

import faulthandler
import os
import socket
import stat
import struct
import sys
import threading
from multiprocessing.connection import Connection

import msgspec

from helmsman.api.errors import HandleLostError, ProtocolError
from helmsman.api.scheduler import ResultHandle
from helmsman.rpc_server import shm
from helmsman.rpc_server.codec import Payload, encode
from helmsman.rpc_server.host import EngineHost
from helmsman.rpc_server.messages import Reply, Verb, WorkerIdentity
from helmsman.rpc_server.proved_server import ProvedServer
from helmsman.rpc_server.threads import share_interpreter
from helmsman.rpc_server.wire import (
    MAX_FRAME_BYTES,
    ReplyFrame,
    decode_request,
    encode_frame,
    fitting_path,
)


class LocalHandleStore:
    """Keeps results in shared memory, where any process of this user can map them."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[shm.ShmSegment | None, bytes]] = {}

    def put(self, handle_id: str, payload: Payload) -> bytes:
        """Keep a payload; its location is its wire form."""
        wire, segment = shm.to_wire(payload, threshold=0)
        location = msgspec.msgpack.encode(wire)
        self._kept[handle_id] = (segment, location)
        return location

    def fetch(self, handle: ResultHandle) -> Payload:
        """Map the value; works in any process of this machine while the maker lives and keeps it."""
        try:
            return shm.from_wire(msgspec.msgpack.decode(handle.location, type=shm.WirePayload))
        except ProtocolError as error:
            raise HandleLostError(worker_id=handle.worker_id, handle_id=handle.id, reason=str(error)) from error

    def drop(self, handle_id: str) -> None:
        """Give the memory back."""
        segment, _ = self._kept.pop(handle_id, (None, b""))
        if segment is not None:
            segment.close()


def listen(path: str) -> socket.socket:
    """A listening Unix socket at ``path`` that only this user can open."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with fitting_path(path) as address:
        listener.bind(address)
    os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
    listener.listen(16)
    return listener


class LocalServer(ProvedServer):
    """Accepts connections on a Unix socket and passes their requests to a host."""

    def __init__(self, host: EngineHost, listener: socket.socket, key: bytes) -> None:
        super().__init__(listener, key)
        self._host = host
        self._results: dict[tuple[int, int], shm.ShmSegment] = {}

    def _may_try(self, peer: socket.socket) -> bool:
        return _is_same_user(peer)

    def _serve_requests(self, connection: Connection, peer: socket.socket) -> None:
        sending = threading.Lock()
        serial = peer.fileno()

        def reply(answer: Reply, payload: Payload) -> None:
            wire, segment = shm.to_wire(payload)
            if segment is not None:
                self._results[serial, answer.id] = segment
            message = encode_frame(ReplyFrame(answer, wire))
            with sending:
                try:
                    connection.send_bytes(message)
                except OSError:
                    self._forget(serial, answer.id)  # the controller has gone; so shall we, by the forkserver's hand

        while True:
            try:
                message = connection.recv_bytes(MAX_FRAME_BYTES)
            except (EOFError, OSError):
                return
            try:
                frame = decode_request(message)
            except msgspec.MsgspecError as error:
                print(f"helmsman: closed a connection that sent {len(message)} bytes of nonsense: {error}", file=sys.stderr)
                return
            if frame.request.verb is Verb.RECEIVED:
                self._forget(serial, frame.request.id)
                continue
            try:
                payload = shm.from_wire(frame.payload)
            except (ProtocolError, OSError) as error:  # no descriptor or memory is left: this request's loss alone
                reply(Reply(frame.request.id, False), encode(ProtocolError(f"its arguments could not be taken: {error}")))
            else:
                self._host.handle(frame.request, payload, reply)

    def _forget(self, serial: int, request_id: int) -> None:
        segment = self._results.pop((serial, request_id), None)
        if segment is not None:
            segment.close()


def _is_same_user(peer: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the socket's folder, which only its owner may enter, is the guard there
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def serve_worker(identity: WorkerIdentity, listener: socket.socket, key: bytes) -> int:
    """A local worker's whole life: serve until SHUTDOWN, with engine methods on this thread. Returns the exit code."""
    faulthandler.enable(all_threads=False)  # the thread that crashed; all would push it out of the log's tail
    share_interpreter()
    host = EngineHost(identity, LocalHandleStore())
    host.on_shutdown = host.engine_thread.stop
    server = LocalServer(host, listener, key)
    threading.Thread(target=server.serve_forever, name="accept", daemon=True).start()
    host.engine_thread.run()
    server.close()
    host.close()
    return 0
