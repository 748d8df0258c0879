"""Requests and replies as single messages, with their payloads where these are small."""

from __future__ import annotations

import msgspec

from helmsman.rpc_server.codec import Payload
from helmsman.rpc_server.messages import Reply, Request

INLINE_BYTES = 64 * 1024
"""Payloads below this travel inside a message to a Ray actor; Ray moves larger arguments through its object store from 100 KB
on."""

PackedFrame = tuple[bytes, Payload | None]
"""The encoded SmallFrame, and the payload when it is not inside."""


class SmallFrame(msgspec.Struct, frozen=True, array_like=True):
    """A request or reply, with its payload when that is small and free of handles."""

    head: Request | Reply
    data: bytes = b""
    """The payload's stream; empty when the payload is not inside."""
    buffers: list[bytes] = []
    number: int = 0
    """Of a request for engine work: its place in the order in which its sender sent those."""
    serial: int = 0
    """Its number on the direct channel."""
    settled: int = 0
    """Of a request on the channel: replies with smaller serials have arrived."""


class RequestFrame(SmallFrame, frozen=True, array_like=True):
    """To the worker."""

    head: Request


class ReplyFrame(SmallFrame, frozen=True, array_like=True):
    """Back to the controller."""

    head: Reply


_encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(RequestFrame).decode
decode_reply = msgspec.msgpack.Decoder(ReplyFrame).decode


def is_small(payload: Payload, inline_below: int = INLINE_BYTES) -> bool:
    """Whether a payload may travel inside a message."""
    return not payload.handles and payload.nbytes < inline_below


def pack(
    head: Request | Reply,
    payload: Payload,
    *,
    inline_below: int = INLINE_BYTES,
    number: int = 0,
    serial: int = 0,
    settled: int = 0,
) -> PackedFrame:
    """One bytes object where the payload is small: Ray serialises each argument on its own, and one is the cheapest."""
    if not is_small(payload, inline_below):
        return _encode(SmallFrame(head, b"", [], number, serial, settled)), payload
    buffers = [bytes(buffer) for buffer in payload.buffers]
    return _encode(SmallFrame(head, bytes(payload.data), buffers, number, serial, settled)), None


def unpack_reply(packed: PackedFrame) -> tuple[Reply, Payload]:
    """What ``pack`` made of a reply."""
    frame = decode_reply(packed[0])
    return frame.head, packed[1] or Payload(frame.data, list(frame.buffers), [])
