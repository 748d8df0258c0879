"""Requests and replies as messages, and messages on a socket.

A message has the format of ``multiprocessing.connection``: its length, then its bytes.
"""

from __future__ import annotations

import struct

import msgspec

from helmsman.api.errors import ProtocolError
from helmsman.rpc_server._wire.messages import Reply, Request
from helmsman.rpc_server._wire.payload import WirePayload

MAX_FRAME_BYTES = 1 << 30
"""Largest message; large buffers travel beside it, so only a huge in-band pickle comes near it."""


class RequestFrame(msgspec.Struct, frozen=True, array_like=True):
    """A request in a message."""

    request: Request
    payload: WirePayload | None = None
    """None when it travels beside the message."""


class ReplyFrame(msgspec.Struct, frozen=True, array_like=True):
    """A reply in a message."""

    reply: Reply
    payload: WirePayload | None = None
    """None when it travels beside the message."""


encode_frame = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(ReplyFrame).decode
decode_request = msgspec.msgpack.Decoder(RequestFrame).decode

_LENGTH = struct.Struct("!i")
LENGTH_BYTES = _LENGTH.size


def pack_length(size: int) -> bytes:
    """The length before a message of this size. Raises ProtocolError for one that is too large."""
    require_size(size)
    return _LENGTH.pack(size)


def unpack_length(prefix: bytes, most: int = MAX_FRAME_BYTES) -> int:
    """The size of the message behind this prefix. Raises ProtocolError for a negative size, or one of more than ``most``."""
    (size,) = _LENGTH.unpack(prefix)
    if not 0 <= size <= most:
        raise ProtocolError(f"a message of {size} bytes was announced, expected at most {most}")
    return int(size)


def salvage_request_id(body: memoryview) -> int | None:
    """The id of a request that ``decode_request`` refuses; None where that cannot be read either."""
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
        """Add received bytes; returns the messages that they complete. Raises ProtocolError on a length that cannot be."""
        if not self._buffer and len(data) >= _LENGTH.size and len(data) == _LENGTH.size + _LENGTH.unpack_from(data)[0]:
            return [data[_LENGTH.size :]]  # by far the most common: one whole message
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if not 0 <= size <= MAX_FRAME_BYTES:
                raise ProtocolError(f"the peer announced a message of {size} bytes")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            frames.append(bytes(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        if start:
            del self._buffer[:start]
        return frames


def require_size(size: int) -> None:
    """Raise ProtocolError for a message that is too large."""
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a message of {size} bytes is larger than the limit of {MAX_FRAME_BYTES}; send bulk data as tensors, arrays or "
            "bytearrays, which travel beside the message"
        )
