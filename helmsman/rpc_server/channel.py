"""The worker's end of the direct channel: small requests over a TCP connection, past Ray.

A channel may be lost while its worker lives. So that nothing is sent twice then, the worker remembers each request that came
by the channel, and its reply, until the controller has said that it has the reply; by way of Ray the controller asks what
became of a request (``collect``). One that has not arrived by then is refused for good, and may be sent by way of Ray.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection

import msgspec

from helmsman.rpc_server.codec import Payload
from helmsman.rpc_server.frames import PackedFrame, RequestFrame, decode_request, pack
from helmsman.rpc_server.messages import Reply
from helmsman.rpc_server.proved_server import ProvedServer
from helmsman.rpc_server.wire import MAX_FRAME_BYTES

CHANNEL_BYTES = 1 << 20
"""Payloads below this travel by the channel; larger ones through the object store."""

Begin = Callable[[RequestFrame, Payload, Callable[[Reply, Payload], None]], None]


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of this address. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(16)
    except OSError:
        listener.close()
        raise
    return listener


class ChannelServer(ProvedServer):
    """Serves the channel of one worker.

    Args:
        begin: starts a request; called from the connection's thread, returns without waiting for engine code.
    """

    def __init__(self, listener: socket.socket, key: bytes, begin: Begin) -> None:
        super().__init__(listener, key)
        self._begin = begin
        self._lock = threading.Lock()
        self._outcomes: dict[int, Future[PackedFrame]] = {}
        """Of requests that arrived, by serial, in that order, until the controller has their replies."""
        self._refused: set[int] = set()

    def start(self) -> None:
        """Accept on a thread of its own."""
        threading.Thread(target=self.serve_forever, name="accept", daemon=True).start()

    def collect(self, serial: int) -> Future[PackedFrame] | None:
        """The reply of a request that arrived, told once. None for one that did not, and now never will."""
        with self._lock:
            outcome = self._outcomes.pop(serial, None)
            if outcome is None:
                self._refused.add(serial)
            return outcome

    def _serve_requests(self, connection: Connection, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sending = threading.Lock()
        while True:
            try:
                frame = decode_request(connection.recv_bytes(MAX_FRAME_BYTES))
            except (EOFError, OSError):
                return
            except msgspec.MsgspecError as error:
                print(f"helmsman: closed a channel that sent nonsense: {error}", file=sys.stderr)
                return
            self._take(frame, connection, sending)

    def _take(self, frame: RequestFrame, connection: Connection, sending: threading.Lock) -> None:
        outcome: Future[PackedFrame] = Future()
        with self._lock:
            if frame.serial in self._refused:
                return
            self._outcomes[frame.serial] = outcome
            while (oldest := next(iter(self._outcomes))) < frame.settled:
                del self._outcomes[oldest]

        def reply(answer: Reply, result: Payload) -> None:
            packed = pack(answer, result, inline_below=CHANNEL_BYTES, serial=frame.serial)
            outcome.set_result(packed)
            with sending:
                try:
                    connection.send_bytes(packed[0])
                except OSError:
                    return  # the channel is lost; the controller collects by way of Ray

        self._begin(frame, Payload(frame.data, list(frame.buffers), []), reply)
