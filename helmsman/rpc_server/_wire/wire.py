"""Requests and replies as messages on a connection, and the session by which messages survive the
loss of a connection.

A payload is one message between processes of one machine, with small parts inside and large ones in
a segment:

    sender                                            receiver
    wire, segment = to_wire(encode(value))
    send msgpack(wire) ─────────────────────────────> payload = from_wire(wire)
    segment.close()  <──────── a confirmation ─────── value = decode(payload)

After ``to_wire`` tensors may be written to again. Without segments (macOS, or between machines) all
goes inside the message.

A connection begins with a resumption of its session. Each message then arrives once and in order,
also after a reconnection:

    connector                                           listener
    token, attempt, messages received   ------->                     attempt 0 opens a new session
                                        <-------   number of messages received, or -1: unknown token
    messages that the other end lacks   <------>   messages that the other end lacks
    then each message: length, number of messages received, body

Both ends keep each message until the other end has confirmed it. Every message confirms all that
were received before it; one without a body does nothing else and is not counted. An attempt that
arrives after a later one is refused.
"""

from __future__ import annotations

import collections
import pickle
import struct
from typing import Any

import msgspec

from helmsman.api.errors import ProtocolError
from helmsman.rpc_server._wire.codec import Payload
from helmsman.rpc_server._wire.messages import ENGINE_WORK, Reply, Request, Verb, dotted
from helmsman.rpc_server._wire.segments import (
    HAS_SEGMENTS,
    SegmentLocation,
    ShmSegment,
    attach,
    pack,
)

_CALLS = frozenset({Verb.CALL, Verb.CREATE_ENGINE})

INLINE_BYTES = 64 * 1024
"""From here on a buffer, or a pickle stream, goes in a segment."""

_INLINE_BUDGET = 16  # thresholds' worth of small buffers inside one message


class WirePayload(msgspec.Struct, array_like=True):
    """A payload as one message of msgpack: small parts inside, large ones in a segment."""

    data: bytes
    """The pickle stream; empty when it is the last buffer of the segment."""
    inline: list[bytearray] = []
    """The small buffers, in their order."""
    is_inline: list[bool] = []
    """For each buffer of the payload, in order, whether it is in ``inline``; the others are in the
    segment, in order.
    """
    handles: bytes = b""
    """The handles, pickled, since their locations are the transport's own; empty when there are
    none.
    """
    segment: SegmentLocation | None = None
    """Where the large buffers are."""


def to_wire(
    payload: Payload, *, threshold: int = INLINE_BYTES, segments: bool = True
) -> tuple[WirePayload, ShmSegment | None]:
    """Make a payload ready to send to another process: what msgpack can encode, and the segment, if
    one was needed, which is to be kept open until the receiver has attached.

    Buffers, and a pickle stream, of ``threshold`` bytes or more go in a segment. So do smaller ones
    once those inside the message make up 16 times as much. Without ``segments`` all goes inside.
    Raises: OSError.
    """
    data = payload.data if isinstance(payload.data, bytes) else bytes(payload.data)
    handles = pickle.dumps(payload.handles, 5) if payload.handles else b""
    segments = segments and HAS_SEGMENTS
    if not payload.buffers and not (segments and len(data) >= threshold):
        return WirePayload(data, handles=handles), None
    inline: list[bytearray] = []
    is_inline: list[bool] = []
    shared: list[Any] = []
    budget = _INLINE_BUDGET * threshold
    for buffer in payload.buffers:
        num_bytes = memoryview(buffer).nbytes
        inside = not segments or num_bytes == 0 or (num_bytes < threshold and num_bytes <= budget)
        is_inline.append(inside)
        if inside:
            inline.append(bytearray(buffer))
            budget -= num_bytes
        else:
            shared.append(buffer)
    if segments and len(data) >= threshold:
        shared.append(data)
        data = b""
    segment = pack(shared) if shared else None
    return WirePayload(
        data, inline, is_inline, handles, segment.location if segment else None
    ), segment


def from_wire(wire: WirePayload, *, populated: bool = True) -> Payload:
    """The payload that ``to_wire`` made ready. All its buffers can be written to and belong to the
    receiver alone. Without ``populated`` the caller maps the pages of the segment
    (``memory.populate``).

    Raises: ProtocolError where the segment is gone, or is not what the message says.
    """
    if not wire.is_inline and wire.segment is None and not wire.inline and wire.data:
        return Payload(wire.data, [], pickle.loads(wire.handles) if wire.handles else [])
    shared = attach(wire.segment, populated=populated) if wire.segment else []
    if len(wire.inline) + len(shared) != len(wire.is_inline) + (not wire.data):
        raise ProtocolError(
            f"a payload of {len(wire.is_inline)} buffers came with {len(wire.inline)} inside the "
            f"message and {len(shared)} "
            "in its segment. Controller and worker must run the same version of helmsman."
        )
    data = wire.data or shared.pop()
    inside, outside = iter(wire.inline), iter(shared)
    buffers = [next(inside) if is_inside else next(outside) for is_inside in wire.is_inline]
    return Payload(data, buffers, pickle.loads(wire.handles) if wire.handles else [])


MAX_FRAME_BYTES = 1 << 30
"""Largest message; large buffers travel beside it, so only a huge in-band pickle comes near it."""


class RequestFrame(msgspec.Struct, frozen=True, array_like=True):
    request: Request
    payload: WirePayload | None = None
    """None when it travels beside the message."""


class ReplyFrame(msgspec.Struct, frozen=True, array_like=True):
    reply: Reply
    payload: WirePayload | None = None
    """None when it travels beside the message."""


encode_frame = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(ReplyFrame).decode
decode_request = msgspec.msgpack.Decoder(RequestFrame).decode

_LENGTH = struct.Struct("!i")
LENGTH_BYTES = _LENGTH.size


def pack_length(size: int) -> bytes:
    require_size(size)
    return _LENGTH.pack(size)


def unpack_length(prefix: bytes | bytearray, most: int = MAX_FRAME_BYTES) -> int:
    """The size of the message behind this prefix. Raises ProtocolError for a negative size, or one
    of more than ``most``.
    """
    (size,) = _LENGTH.unpack(prefix)
    if not 0 <= size <= most:
        raise ProtocolError(f"a message of {size} bytes was announced, expected at most {most}")
    return int(size)


def salvage_request_id(body: memoryview) -> int | None:
    """The id of a request that ``decode_request`` refuses; None where that cannot be read
    either.
    """
    try:
        request_id = msgspec.msgpack.decode(body)[0][0]
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, RecursionError):
        return None  # so many bytes are not a request at all
    return request_id if type(request_id) is int else None


class FrameReader:
    """Takes bytes as they come and gives back whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        if (
            not self._buffer
            and len(data) >= _LENGTH.size
            and len(data) == _LENGTH.size + _LENGTH.unpack_from(data)[0]
        ):
            return [data[_LENGTH.size :]]  # by far the most common: one whole message
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + unpack_length(self._buffer[start:begin])
            if len(self._buffer) < end:
                break
            frames.append(bytes(memoryview(self._buffer)[begin:end]))
            start = end
        del self._buffer[:start]
        return frames


def require_size(size: int) -> None:
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a message of {size} bytes is larger than the limit of {MAX_FRAME_BYTES}; send bulk "
            "data as tensors, arrays or "
            "bytearrays, which travel beside the message"
        )


class Outgoing:
    """A request and its payload. The message of a small one is made once for all workers that it
    goes to.
    """

    __slots__ = ("_body", "in_order", "is_call", "is_small", "num_bytes", "payload", "request")

    def __init__(self, request: Request, payload: Payload) -> None:
        self.request = request
        self.payload = payload
        self.num_bytes = payload.nbytes
        self.is_small = self.num_bytes < INLINE_BYTES
        """Whether it is one message without a segment."""
        self.in_order = request.verb in ENGINE_WORK
        self.is_call = request.verb in _CALLS
        """Whether it runs an engine's own code."""
        self._body: bytes | None = None

    def body(self) -> bytes:
        if self._body is None:
            self._body, _ = self.packed(shares_memory=False)
        return self._body

    def packed(self, *, shares_memory: bool) -> tuple[bytes, ShmSegment | None]:
        """The encoded RequestFrame of any, and the segment of its large buffers if there is one.
        Raises OSError, ProtocolError.
        """
        wire, segment = to_wire(self.payload, segments=shares_memory)
        try:
            return self.framed(wire), segment
        except ProtocolError:
            if segment is not None:
                segment.close()
            raise

    def framed(self, wire: WirePayload | None = None) -> bytes:
        try:
            return encode_frame(RequestFrame(self.request, wire))
        except (UnicodeEncodeError, TypeError, OverflowError) as error:
            name = dotted(self.request.engine_name, self.request.method) or self.request.verb.value
            raise ProtocolError(
                f"the request {name!r} cannot be encoded: {error}. Nothing was sent."
            ) from error


HELLO = struct.Struct("!16sqq")
"""First message of a connector: the session's token, the number of the attempt, and how many
messages it has received.
"""
WELCOME = struct.Struct("!q")
"""The answer: how many messages the listener has received; -1 where it does not know the
session.
"""

_COUNTED = struct.Struct("!iq")
_COUNT = struct.Struct("!q")
_CONFIRM_EACH = 64


class Session:
    """One end of a session.

    The caller serializes the methods that make bytes, and writes the bytes in that order. It
    serializes ``take`` and ``taken``.
    """

    def __init__(self) -> None:
        self.num_received = 0
        self._num_told = 0
        """Messages whose receipt was confirmed by what was written last."""
        self._num_confirmed = 0
        self._kept: collections.deque[tuple[bytes, ShmSegment | None]] = collections.deque()
        """Messages that are not confirmed, and the segment that belongs to each."""
        self._num_bytes = self._num_confirmed_bytes = 0
        """Two counts, since ``keep`` and ``take`` may run on different threads."""

    @property
    def num_kept_bytes(self) -> int:
        return self._num_bytes - self._num_confirmed_bytes

    def keep(self, body: bytes, segment: ShmSegment | None = None) -> bytes:
        """Keep a message, and its segment open, until it is confirmed; returns the bytes to write.

        Raises: ProtocolError for one that is too large, which is not kept.
        """
        size = len(body) + _COUNT.size
        if size > MAX_FRAME_BYTES:
            if segment is not None:
                segment.close()
            require_size(size)
        self._num_bytes += size if segment is None else size + segment.nbytes
        self._kept.append((body, segment))
        self._num_told = self.num_received
        return _COUNTED.pack(size, self._num_told) + body

    def take(self, message: bytes) -> memoryview:
        """The body of a message from the peer, without its length; empty for a mere confirmation.
        Raises ProtocolError.
        """
        if len(message) < _COUNT.size:
            raise ProtocolError(
                f"a message of {len(message)} bytes came, expected at least {_COUNT.size}"
            )
        (num_received,) = _COUNT.unpack_from(message)
        if num_received != self._num_confirmed:
            self._confirm(num_received)
        return memoryview(message)[_COUNT.size :]

    def taken(self, num_bytes: int, wire: WirePayload | None) -> bool:
        """Count a message of this size and payload; returns whether a confirmation is due, which no
        other message carries.
        """
        self.num_received += 1
        if num_bytes >= INLINE_BYTES or (wire is not None and wire.segment is not None):
            return True
        return self.num_received - self._num_told >= _CONFIRM_EACH

    def confirmation(self) -> bytes:
        self._num_told = self.num_received
        return _COUNTED.pack(_COUNT.size, self._num_told)

    def resume(self, num_received: int) -> list[bytes]:
        """The bytes that a new connection begins with, at the other end of which so many messages
        were received.

        Raises: ProtocolError where that cannot be.
        """
        self._confirm(num_received)
        return [
            _COUNTED.pack(len(body) + _COUNT.size, self.num_received) + body
            for body, _ in self._kept
        ]

    def close(self) -> None:
        self._confirm(self._num_confirmed + len(self._kept))

    def _confirm(self, num_received: int) -> None:
        num_new = num_received - self._num_confirmed
        if not 0 <= num_new <= len(self._kept):
            raise ProtocolError(
                f"the peer says that it has received {num_received} messages, expected "
                f"{self._num_confirmed} to "
                f"{self._num_confirmed + len(self._kept)}"
            )
        for _ in range(num_new):
            body, segment = self._kept.popleft()
            self._num_confirmed_bytes += len(body) + _COUNT.size
            if segment is not None:
                self._num_confirmed_bytes += segment.nbytes
                segment.close()
        self._num_confirmed = num_received
