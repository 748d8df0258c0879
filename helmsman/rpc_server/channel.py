"""The worker's end of a direct connection: requests and their replies over an authenticated socket.

On Ray such a channel may be lost while its worker lives. So that nothing is sent twice then, the worker remembers each request
that came by the channel, and its reply, until the controller has said that it has the reply; by way of Ray the controller asks
what became of a request (``collect``). One that has not arrived by then is refused for good, and may be sent by way of Ray.
"""

from __future__ import annotations

import functools
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from helmsman.api.errors import ProtocolError
from helmsman.rpc_server.authenticated_server import BACKLOG, AuthenticatedServer, Connection
from helmsman.rpc_server.codec import Payload, encode
from helmsman.rpc_server.frames import ReplyFrame, RequestFrame, decode_request, encode_frame
from helmsman.rpc_server.host import EngineHost
from helmsman.rpc_server.messages import ENGINE_WORK, Reply, Verb
from helmsman.rpc_server.segments import ShmSegment
from helmsman.rpc_server.tls import ServerTls
from helmsman.rpc_server.wire_payload import WirePayload, from_wire, to_wire

CHANNEL_BYTES = 1 << 20
"""Payloads below this travel by a channel between machines; larger ones through Ray's object store."""

Answer = tuple[Reply, Any]
"""A reply, and its payload or what ``keep_apart`` made of it."""


def listen_tcp(address: str) -> socket.socket:
    """A listening socket on a free port of this address. Raises OSError."""
    return _listening(socket.AF_INET6 if ":" in address else socket.AF_INET, (address, 0))


def listen_abstract() -> socket.socket:
    """A listening Unix socket with a random name in Linux's abstract namespace.

    It has no file: nothing is left when the process is killed, and no TMPDIR is too long. Any user may connect, so the server
    checks the peer's user id (AuthenticatedServer).
    """
    return _listening(socket.AF_UNIX, f"\0helmsman-{secrets.token_hex(16)}")


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
    """Whether a payload may travel by a channel: those that are large need shared memory, and so do handles."""
    if shares_memory:
        return all(type(handle.location) is bytes for handle in payload.handles)
    return not payload.handles and payload.nbytes < CHANNEL_BYTES


class _Outcome:
    """What came of a request, as long as the controller may not have it."""

    __slots__ = ("answer", "asked", "segment", "wire")

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.wire: WirePayload | None = None
        """The payload, where the channel could carry it."""
        self.segment: ShmSegment | None = None
        self.asked: Future[Answer] | None = None

    def tell(self) -> None:
        """Give the answer to who has asked for it, once both are there."""
        if self.answer is not None and self.asked is not None and not self.asked.done():
            reply, payload = self.answer
            self.asked.set_result((reply, payload if self.wire is None else from_wire(self.wire)))


class ChannelServer(AuthenticatedServer):
    """Serves the channel of one worker.

    Args:
        host: answers the requests.
        shares_memory: whether the controller is on this machine, so that large buffers need not go over the socket.
        tls: the certificate for connections from other machines; None for plain ones.
        in_turn: runs what begins engine work, given with its number, in the order of these; at once when None, as requests
            arrive.
        keep_apart: where the connection may be lost without the worker's end, what keeps a payload that the channel cannot
            carry, until the controller asks for it by another way.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        host: EngineHost,
        *,
        shares_memory: bool,
        tls: ServerTls | None = None,
        in_turn: Callable[[int, Callable[[], None]], None] | None = None,
        keep_apart: Callable[[Payload], Any] | None = None,
    ) -> None:
        super().__init__(listener, key, tls)
        self._host = host
        self._shares_memory = shares_memory
        self._in_turn = in_turn
        self._keep_apart = keep_apart
        self._lock = threading.Lock()
        self._outcomes: dict[int, _Outcome] = {}
        """By request id: of all that arrived, where the connection may be lost; else of those whose replies are in segments."""
        self._refused: set[int] = set()

    def collect(self, request_id: int) -> Future[Answer] | None:
        """The reply of a request that arrived. None for one that did not, and now never will."""
        with self._lock:
            outcome = self._outcomes.get(request_id)
            if outcome is None:
                self._refused.add(request_id)
                return None
            outcome.asked = Future()
            outcome.tell()
            return outcome.asked

    def forget(self, request_ids: Sequence[int]) -> None:
        """The controller has these replies."""
        with self._lock:
            gone = [self._outcomes.pop(request_id, None) for request_id in request_ids]
        for outcome in gone:
            if outcome is not None and outcome.segment is not None:
                outcome.segment.close()

    def _serve_requests(self, connection: Connection) -> None:
        def send(message: bytes) -> bool:
            try:
                connection.send(message)
            except OSError:  # the channel is lost: the controller asks by another way, or is gone as well
                return False
            return True

        while True:
            try:
                message = connection.receive()
            except (EOFError, OSError):
                return
            except ProtocolError as error:
                print(f"helmsman: closed a connection that sent nonsense: {error}", file=sys.stderr)
                return
            try:
                self._take(*decode_request(message), send)
            except msgspec.MsgspecError as error:
                print(f"helmsman: closed a connection that sent {len(message)} bytes of nonsense: {error}", file=sys.stderr)
                return

    def _take(self, number: int, frame: RequestFrame, send: Callable[[bytes], bool]) -> None:
        request = frame.request
        if frame.payload is None:
            raise msgspec.DecodeError("a request without its payload")
        if request.verb is Verb.RECEIVED:
            self.forget(msgspec.msgpack.decode(frame.payload.data, type=list[int]))
            return
        outcome = _Outcome()
        if self._keep_apart is not None:
            with self._lock:
                if request.id in self._refused:
                    return
                self._outcomes[request.id] = outcome

        def reply(answer: Reply, result: Payload) -> None:
            if not send(self._packed(outcome, answer, result)) and self._keep_apart is None:
                self.forget([answer.id])

        try:
            payload = from_wire(frame.payload)
        except (ProtocolError, OSError) as error:  # no descriptor or memory is left: this request's loss alone
            failure = encode(ProtocolError(f"its arguments could not be taken: {error}"))
            begin = functools.partial(reply, Reply(request.id, False), failure)
        else:
            begin = functools.partial(self._host.handle, request, payload, reply)
        if self._in_turn is not None and request.verb in ENGINE_WORK:
            self._in_turn(number, begin)  # also what failed has its turn, for which others wait
        else:
            begin()

    def _packed(self, outcome: _Outcome, answer: Reply, result: Payload) -> bytes:
        wire, segment = None, None
        if self._keep_apart is None or can_carry(result, shares_memory=self._shares_memory):
            wire, segment = to_wire(result, segments=self._shares_memory)
        if self._keep_apart is not None:
            kept = None if wire is not None else self._keep_apart(result)
            with self._lock:
                outcome.answer, outcome.wire, outcome.segment = (answer, kept), wire, segment
                outcome.tell()
        elif segment is not None:
            with self._lock:
                outcome.segment = segment
                self._outcomes[answer.id] = outcome
        return encode_frame(ReplyFrame(answer, wire))
