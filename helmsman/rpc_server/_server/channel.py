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
from typing import Any, NamedTuple

import msgspec

from helmsman.api.errors import ProtocolError
from helmsman.rpc_server._host.host import EngineHost, ReplyFn
from helmsman.rpc_server._server.authenticated_server import BACKLOG, AuthenticatedServer, Connection
from helmsman.rpc_server._wire.codec import Payload, encode
from helmsman.rpc_server._wire.frames import ReplyFrame, RequestFrame, decode_request, encode_frame, salvage_request
from helmsman.rpc_server._wire.messages import ENGINE_WORK, Reply, Verb
from helmsman.rpc_server._wire.payload import WirePayload, from_wire, to_wire
from helmsman.rpc_server._wire.segments import ShmSegment
from helmsman.rpc_server._wire.tls import ServerTls

CHANNEL_BYTES = 1 << 20
"""Payloads below this travel by a channel between machines; larger ones through Ray's object store."""

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding a message may raise."""

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


class Arrival(NamedTuple):
    """A request that has arrived, and its answer."""

    number: int
    request_id: int
    in_order: bool
    """Whether it is engine work, which begins in the order of the numbers."""
    answer: Callable[[ReplyFn], None]
    """Answers the request: by the host where it could be decoded, else by an error."""


def understood(host: EngineHost, number: int, frame: RequestFrame, beside: Payload | None = None) -> Arrival:
    """A request whose frame could be decoded; ``beside`` is its payload where that is not in the frame."""
    request = frame.request
    try:
        if beside is None:
            if frame.payload is None:
                raise ProtocolError("they have not come with it")
            beside = from_wire(frame.payload)
    except Exception as error:  # noqa: BLE001 - no descriptor or memory is left, or it does not unpickle: its own loss alone
        answer = _refusal(request.id, f"its arguments could not be taken: {type(error).__name__}: {error}")
    else:
        answer = functools.partial(host.handle, request, beside)
    return Arrival(number, request.id, request.verb in ENGINE_WORK, answer)


def refused(message: bytes, error: Exception) -> Arrival:
    """A request that could not be decoded because of ``error``; it is answered by that. Raises ProtocolError without an id."""
    reason = f"{len(message)} bytes that came as a request could not be decoded: {error}"
    head = salvage_request(message)
    if head is None:
        raise ProtocolError(reason) from error
    return Arrival(head.number, head.request_id, head.in_order, _refusal(head.request_id, reason))


def _refusal(request_id: int, reason: str) -> Callable[[ReplyFn], None]:
    def answer(reply: ReplyFn) -> None:
        reply(Reply(request_id, False), encode(ProtocolError(reason)))

    return answer


def _ids_in(frame: RequestFrame) -> list[int]:
    if frame.payload is None:
        raise msgspec.DecodeError("no request ids")
    return msgspec.msgpack.decode(frame.payload.data, type=list[int])


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
        in_turn: (number, function); calls the functions that begin engine work in the order of their numbers. None: they are
            called as requests arrive.
        keep_apart: keeps a payload that the channel cannot carry until the controller asks for it by another way. None where
            the connection lasts as long as the worker.
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
                number, frame = decode_request(message)
                if frame.request.verb is Verb.RECEIVED:
                    self.forget(_ids_in(frame))
                    continue
                arrival = understood(self._host, number, frame)
            except UNDECODABLE as error:
                try:
                    arrival = refused(message, error)
                except ProtocolError as reason:
                    print(f"helmsman: closed a connection: {reason}", file=sys.stderr)
                    return
            self._take(arrival, send)

    def _take(self, arrival: Arrival, send: Callable[[bytes], bool]) -> None:
        outcome = _Outcome()
        if self._keep_apart is not None:
            with self._lock:
                if arrival.request_id in self._refused:
                    return
                self._outcomes[arrival.request_id] = outcome

        def reply(answer: Reply, result: Payload) -> None:
            if not send(self._packed(outcome, answer, result)) and self._keep_apart is None:
                self.forget([answer.id])

        begin = functools.partial(arrival.answer, reply)
        if self._in_turn is not None and arrival.in_order:
            self._in_turn(arrival.number, begin)  # also what failed has its turn, for which others wait
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
