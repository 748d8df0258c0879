"""Requests and replies as messages of one connection.

Between processes of one machine a payload is one message, with small parts inside and large ones in
a segment:

    sender                                            receiver
    wire, segment = to_wire(encode(value))
    send msgpack(wire) ─────────────────────────────> payload = from_wire(wire)
    segment.close()  <──────── a confirmation ─────── value = decode(payload)

After ``to_wire`` tensors may be written to again. Without segments (macOS, or between machines) all
parts go inside the message.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

import msgspec

from helmsman._wire.codec import Payload
from helmsman._wire.messages import ENGINE_WORK, Reply, Request, Verb, dotted
from helmsman._wire.segments import (
    HAS_SEGMENTS,
    SegmentLocation,
    ShmSegment,
    attach,
    pack,
)
from helmsman.api.errors import ProtocolError

_CALLS = frozenset({Verb.CALL, Verb.CREATE_ENGINE})

INLINE_BYTES = 64 * 1024
"""Buffers and pickle streams of this size or more go in a segment."""

_INLINE_BUDGET = 16  # limit for all small buffers inside one message, in thresholds


class WirePayload(msgspec.Struct, array_like=True):
    """A payload as one msgpack message: small parts inside, large ones in a segment."""

    data: bytes
    """The pickle stream; empty if it is the last buffer of the segment."""
    inline: list[bytearray] = []
    """The small buffers, in order."""
    is_inline: list[bool] = []
    """For each buffer of the payload, in order: whether it is the next one of ``inline``, or else
    of the segment.
    """
    handles: bytes = b""
    """The handles, pickled, since each transport has its own locations; empty if there are none."""
    segment: SegmentLocation | None = None
    """Location of the large buffers."""


def to_wire(
    payload: Payload, *, threshold: int = INLINE_BYTES, segments: bool = True
) -> tuple[WirePayload, ShmSegment | None]:
    """Prepare a payload for another process.

    Args:
        payload: The payload.
        threshold: Buffers and pickle streams of this many bytes or more go in a segment. So do
            smaller buffers once those inside the message exceed 16 times as much.
        segments: False puts everything inside the message.

    Returns:
        The message, and its segment if it needs one. The caller keeps the segment open until the
        receiver has attached.

    Raises:
        OSError: The segment cannot be allocated.
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
    """Restore the payload that ``to_wire`` prepared. Its buffers are private and writable.

    Args:
        wire: The message.
        populated: Map the segment's pages now; if False, the caller does (``memory.populate``).

    Raises:
        ProtocolError: The segment no longer exists, or does not match the message.
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
"""Largest message. Large buffers are sent beside it, so only a huge in-band pickle comes near."""


class RequestFrame(msgspec.Struct, frozen=True, array_like=True):
    request: Request
    payload: WirePayload | None = None
    """None if it is sent beside the message."""


class ReplyFrame(msgspec.Struct, frozen=True, array_like=True):
    reply: Reply
    payload: WirePayload | None = None
    """None if it is sent beside the message."""


encode_frame = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(ReplyFrame).decode
decode_request = msgspec.msgpack.Decoder(RequestFrame).decode

_LENGTH = struct.Struct("!i")
LENGTH_BYTES = _LENGTH.size


def pack_length(size: int) -> bytes:
    require_size(size)
    return _LENGTH.pack(size)


def unpack_length(prefix: bytes | bytearray, most: int = MAX_FRAME_BYTES) -> int:
    """Return the size of the message behind this prefix.

    Raises:
        ProtocolError: The size is negative, or more than ``most``.
    """
    (size,) = _LENGTH.unpack(prefix)
    if not 0 <= size <= most:
        raise ProtocolError(f"a message of {size} bytes was announced, expected at most {most}")
    return int(size)


def salvage_request_id(body: memoryview) -> int | None:
    """Return the id of a request that ``decode_request`` rejects; None if it is unreadable, too."""
    try:
        request_id = msgspec.msgpack.decode(body)[0][0]
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, RecursionError):
        return None  # not a request at all
    return request_id if type(request_id) is int else None


class FrameReader:
    """Splits a stream of bytes into whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        if (
            not self._buffer
            and len(data) >= _LENGTH.size
            and len(data) == _LENGTH.size + _LENGTH.unpack_from(data)[0]
        ):
            return [data[_LENGTH.size :]]  # the most common case: exactly one message
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
            "bytearrays, which are sent beside the message"
        )


class Outgoing:
    """A request and its payload. A small one is encoded once for all its workers."""

    __slots__ = ("_body", "in_order", "is_call", "is_small", "num_bytes", "payload", "request")

    def __init__(self, request: Request, payload: Payload) -> None:
        self.request = request
        self.payload = payload
        self.num_bytes = payload.nbytes
        self.is_small = self.num_bytes < INLINE_BYTES
        """Whether it fits into one message without a segment."""
        self.in_order = request.verb in ENGINE_WORK
        self.is_call = request.verb in _CALLS
        """Whether it runs engine code."""
        self._body: bytes | None = None

    def body(self) -> bytes:
        if self._body is None:
            self._body, _ = self.packed(shares_memory=False)
        return self._body

    def packed(self, *, shares_memory: bool) -> tuple[bytes, ShmSegment | None]:
        """Return the encoded RequestFrame, and the segment of its large buffers if there is one.

        Raises:
            OSError: The segment cannot be allocated.
            ProtocolError: The request cannot be encoded.
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
