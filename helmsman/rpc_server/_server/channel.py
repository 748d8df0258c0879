"""Worker's end of its channel: decodes requests from authenticated sockets, and sends replies.

A connection may be lost while the worker lives. The controller then reconnects and resumes its
session (session.py), so that each request and each reply arrives exactly once.
"""

from __future__ import annotations

import errno
import functools
import random
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from helmsman._process.ports import RANGE_VARIABLE
from helmsman._wire.codec import Payload, encode
from helmsman._wire.door import BACKLOG
from helmsman._wire.messages import ENGINE_WORK, Reply, Request
from helmsman._wire.segments import ShmSegment
from helmsman._wire.session import HELLO, WELCOME, Session
from helmsman._wire.tls import ServerTls
from helmsman._wire.wire import (
    ReplyFrame,
    WirePayload,
    decode_request,
    encode_frame,
    from_wire,
    salvage_request_id,
    to_wire,
)
from helmsman.api.errors import ProtocolError
from helmsman.rpc_server._host.host import ReplyFn
from helmsman.rpc_server._server.authenticated_server import AuthenticatedServer, Connection

CHANNEL_BYTES = 1 << 20
"""Between machines, payloads below this size use the channel; larger ones are sent beside it."""

_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding a request."""


class PayloadStore(Protocol):
    """Transfers payloads that a channel cannot carry. Methods raise the errors of the transfer."""

    def take(self, request_id: int) -> Payload:
        """Return the arguments of a request, which arrive before it."""

    def keep(self, request_id: int, payload: Payload) -> None:
        """Keep a result until the controller fetches it."""


class Handler(Protocol):
    """Answers requests; an EngineHost, or a controller that calls a Cluster for others."""

    def handle(self, request: Request, payload: Payload, reply: ReplyFn) -> None:
        """Answer a request by ``reply``, now or later."""


def listen_tcp(address: str, ports: range | None = None) -> socket.socket:
    """Listen on a free port of this address.

    Args:
        address: Numeric address of this host.
        ports: Permitted ports; None for any.

    Raises:
        OSError: No port is free, or the address is not available.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in random.SystemRandom().sample(ports or [0], len(ports or [0])):
        try:
            return _listening(family, (address, port))
        except OSError as error:
            if ports is None or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    assert ports is not None
    raise OSError(
        f"none of the ports {ports[0]}-{ports[-1]} of {address} is free for the worker's channel; "
        f"end programs that use them, or set {RANGE_VARIABLE} to a wider range"
    )


def abstract_address() -> str:
    """Return a random name for a Unix socket in Linux's abstract namespace."""
    return f"\0helmsman-{secrets.token_hex(16)}"


def listen_abstract(address: str = "") -> socket.socket:
    """Listen on a Unix socket in Linux's abstract namespace, with a random name by default.

    It has no file: nothing remains if the process is killed, a cleaner of TMPDIR cannot remove it,
    and TMPDIR cannot be too long. Any user may connect, so the server checks the peer's user id
    (AuthenticatedServer).
    """
    return _listening(socket.AF_UNIX, address or abstract_address())


def _listening(family: int, address: str | tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def can_carry(payload: Payload, *, shares_memory: bool) -> bool:
    """Whether a payload may go through a channel: large ones and handles need shared memory."""
    if shares_memory:
        return not payload.handles or all(
            type(handle.location) is bytes for handle in payload.handles
        )
    return not payload.handles and payload.nbytes < CHANNEL_BYTES


class _Arrival(NamedTuple):
    in_order: bool
    """Whether it is engine work, which begins in the order of arrival."""
    wire: WirePayload | None
    answer: Callable[[ReplyFn], None]
    """Answers the request: by the host, or by an error if it could not be decoded."""


class _Peer:
    """A controller: its session and its current connection."""

    def __init__(self) -> None:
        self.session = Session()
        self.receiving = threading.Lock()
        """Held while a message is taken, so that messages are not taken from two connections."""
        self._sending = threading.Lock()
        self._claiming = threading.Lock()
        self._attempt = -1
        """The latest attempt to connect."""
        self._connection: Connection | None = None

    def uses(self, connection: Connection) -> bool:
        return self._connection is connection

    def replace(self, connection: Connection, attempt: int, num_received: int) -> None:
        """Continue with a new connection, unless a later attempt has superseded it.

        Raises:
            EOFError: A later attempt has arrived before it or meanwhile.
            OSError: The new connection failed.
            ProtocolError: The connector reports an impossible number of messages.
        """
        with self._claiming:
            if attempt <= self._attempt:
                raise EOFError
            self._attempt = (
                attempt  # before taking the locks below, for which an earlier attempt may wait
            )
        if self._connection is not None:
            self._connection.abort()
        with self.receiving, self._sending:
            if attempt != self._attempt:
                raise EOFError
            unconfirmed = self.session.resume(num_received)
            self._connection = connection
            connection.send(WELCOME.pack(self.session.num_received))
            for data in unconfirmed:
                connection.send_framed(data)

    def send(self, body: bytes, segment: ShmSegment | None) -> None:
        """Send a message, now or after the next reconnection.

        Raises:
            ProtocolError: The message is too large.
        """
        with self._sending:
            self._write(self.session.keep(body, segment))

    def confirm(self) -> None:
        with self._sending:
            self._write(self.session.confirmation())

    def _write(self, data: bytes) -> None:
        assert self._connection is not None
        try:
            self._connection.send_framed(data)
        except OSError:  # the connection is lost; the next one begins with unconfirmed messages
            self._connection.abort()


class ChannelServer(AuthenticatedServer):
    """Serves the channel of one worker.

    Args:
        listener: Listening socket, which close() closes.
        key: The channel's key.
        host: Answers the requests.
        shares_memory: Whether the controller is on this machine, so that large buffers go through
            shared memory and not the socket.
        tls: The listener's TLS; None for plain connections.
        side_path: Transfers payloads that the channel cannot carry.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        host: Handler,
        *,
        shares_memory: bool,
        tls: ServerTls | None = None,
        side_path: PayloadStore | None = None,
    ) -> None:
        super().__init__(listener, key, tls)
        self._host = host
        self._shares_memory = shares_memory
        self._side_path = side_path
        self._peers: dict[bytes, _Peer] = {}
        """By session token."""

    def _serve_requests(self, connection: Connection) -> None:
        token = b""
        try:
            hello = connection.receive()
            if len(hello) != HELLO.size:
                raise ProtocolError(
                    f"the first message has {len(hello)} bytes, expected {HELLO.size}"
                )
            token, attempt, num_received = HELLO.unpack(hello)
            peer = (
                self._peers.setdefault(token, _Peer()) if attempt == 0 else self._peers.get(token)
            )
            if peer is None:
                connection.send(WELCOME.pack(-1))
                return
            peer.replace(connection, attempt, num_received)
            reply = functools.partial(self._reply, peer)
            while self._serve_request(peer, connection, reply):
                pass
        except (EOFError, OSError):
            return
        except ProtocolError as error:
            # Otherwise the next connection would deliver the same invalid message.
            self._peers.pop(token, None)
            print(
                f"helmsman: closed a connection that broke the protocol: {error}", file=sys.stderr
            )

    def _serve_request(self, peer: _Peer, connection: Connection, reply: ReplyFn) -> bool:
        """Serve the next message; False if another connection has replaced this one."""
        message = connection.receive()
        with peer.receiving:
            if not peer.uses(connection):
                return False  # the other connection delivers the message again
            body = peer.session.take(message)
            if not body:
                return True
            arrival = self._decoded(body)
            is_due = peer.session.taken(len(body), arrival.wire)
            if arrival.in_order:
                arrival.answer(reply)
        if is_due:
            peer.confirm()
        if not arrival.in_order:
            arrival.answer(reply)
        return True

    def _decoded(self, body: memoryview) -> _Arrival:
        """Decode a request and map its payload.

        Raises:
            ProtocolError: The request cannot even be answered, since its id is unreadable.
        """
        try:
            frame = decode_request(body)
        except _UNDECODABLE as error:
            reason = f"a request of {len(body)} bytes could not be decoded: {error}"
            request_id = salvage_request_id(body)
            if request_id is None:
                raise ProtocolError(reason) from error
            return _Arrival(False, None, _refusal(request_id, reason))
        request, wire = frame.request, frame.payload
        try:
            payload = self._beside(request.id) if wire is None else from_wire(wire)
        # No descriptor or memory is left, or unpickling failed: only this request is lost.
        except Exception as error:  # noqa: BLE001
            answer = _refusal(
                request.id, f"its arguments could not be taken: {type(error).__name__}: {error}"
            )
        else:
            answer = functools.partial(self._host.handle, request, payload)
        return _Arrival(request.verb in ENGINE_WORK, wire, answer)

    def _beside(self, request_id: int) -> Payload:
        if self._side_path is None:
            raise ProtocolError("they did not arrive with the request")
        return self._side_path.take(request_id)

    def _reply(self, peer: _Peer, answer: Reply, result: Payload) -> None:
        wire, segment = None, None
        if self._side_path is None or can_carry(result, shares_memory=self._shares_memory):
            wire, segment = to_wire(result, segments=self._shares_memory)
        else:
            self._side_path.keep(answer.id, result)
        peer.send(encode_frame(ReplyFrame(answer, wire)), segment)


def _refusal(request_id: int, reason: str) -> Callable[[ReplyFn], None]:
    def answer(reply: ReplyFn) -> None:
        reply(Reply(request_id, False), encode(ProtocolError(reason)))

    return answer
