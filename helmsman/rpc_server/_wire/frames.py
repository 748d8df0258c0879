"""Requests and replies as messages, and messages on a socket.

A message has the format of ``multiprocessing.connection``: its length, then its bytes. A request begins with a
number of 8 bytes and is otherwise the same for all workers that are asked the same, so it is made once.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from helmsman.api.errors import ProtocolError
from helmsman.rpc_server._wire.messages import ENGINE_WORK, Reply, Request
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
    """None when it travels beside the message, or has to be asked for by another way."""


encode_frame = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(ReplyFrame).decode
_decode_request = msgspec.msgpack.Decoder(RequestFrame).decode

_LENGTH = struct.Struct("!i")
LENGTH_BYTES = _LENGTH.size
_NUMBER = struct.Struct("!q")
_LENGTH_AND_NUMBER = struct.Struct("!iq")


def pack_length(size: int) -> bytes:
    """The length before a message of this size. Raises ProtocolError for one that is too large."""
    _require_size(size)
    return _LENGTH.pack(size)


def unpack_length(prefix: bytes) -> int:
    """The size of the message behind this prefix. Raises ProtocolError for a size that cannot be."""
    (size,) = _LENGTH.unpack(prefix)
    if not 0 <= size <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {size} bytes was announced, expected at most {MAX_FRAME_BYTES}")
    return int(size)


def framed_request(number: int, body: bytes) -> bytes:
    """What is written to a socket: ``body`` is an encoded RequestFrame; the number is its place among the engine work that was
    sent to this worker, and 0 for what is not engine work."""
    size = _NUMBER.size + len(body)
    if size > MAX_FRAME_BYTES:
        _require_size(size)
    return _LENGTH_AND_NUMBER.pack(size, number) + body


def numbered_request(number: int, body: bytes) -> bytes:
    """The same message without its length."""
    return _NUMBER.pack(number) + body


def decode_request(message: bytes) -> tuple[int, RequestFrame]:
    """The number and the frame of a message. Raises msgspec.MsgspecError."""
    if len(message) < _NUMBER.size:
        raise msgspec.DecodeError(f"a request of {len(message)} bytes")
    return _NUMBER.unpack_from(message)[0], _decode_request(memoryview(message)[_NUMBER.size :])


class Salvaged(NamedTuple):
    """The head of a request whose rest cannot be decoded."""

    number: int
    request_id: int
    in_order: bool
    """Whether the request is engine work, whose number later requests wait for."""


def salvage_request(message: bytes) -> Salvaged | None:
    """The head of a message that ``decode_request`` refuses; None when the request's id cannot be read."""
    try:
        number = _NUMBER.unpack_from(message)[0]
        request_id, verb = msgspec.msgpack.decode(memoryview(message)[_NUMBER.size :])[0][:2]
        if type(request_id) is int:
            return Salvaged(number, request_id, number > 0 or verb in ENGINE_WORK)
    except (struct.error, msgspec.MsgspecError, LookupError, TypeError, ValueError, RecursionError):
        pass  # so many bytes are not a request at all
    return None


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


def _require_size(size: int) -> None:
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a message of {size} bytes is larger than the limit of {MAX_FRAME_BYTES}; send bulk data as tensors, arrays or "
            "bytearrays, which travel beside the message"
        )
