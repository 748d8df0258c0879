"""A payload as one message between processes of one machine: small parts inside, large ones in a segment.

    sender                                            receiver
    wire, segment = to_wire(encode(value))
    send msgpack(wire) ─────────────────────────────> payload = from_wire(wire)
    segment.close()  <──────────── any answer ─────── value = decode(payload)

After ``to_wire`` nothing refers to the sender's own memory any more: tensors may be written to again. Without segments (macOS,
or between machines) everything goes inside the message, at the price of copies.
"""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

from helmsman.api.errors import ProtocolError
from helmsman.rpc_server._wire.codec import Payload
from helmsman.rpc_server._wire.segments import HAS_SEGMENTS, SegmentLocation, ShmSegment, attach, pack

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
    """For each buffer of the payload, in order, whether it is in ``inline``; the others are in the segment, in order."""
    handles: bytes = b""
    """The handles, pickled, since their locations are the transport's own; empty when there are none."""
    segment: SegmentLocation | None = None
    """Where the large buffers are."""


def to_wire(payload: Payload, *, threshold: int = INLINE_BYTES, segments: bool = True) -> tuple[WirePayload, ShmSegment | None]:
    """Make a payload ready to send to another process.

    Args:
        payload: from ``encode``.
        threshold: buffers, and a pickle stream, of this many bytes or more go in a segment. So do smaller ones once those
            inside the message make up 16 times as much.
        segments: whether the receiver is on this machine; otherwise all goes inside.

    Returns:
        What msgpack can encode, and the segment, if one was needed, which is to be kept open until the receiver has attached.

    Raises:
        OSError: no memory, or no file descriptor, is left for a segment.
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
    return WirePayload(data, inline, is_inline, handles, segment.location if segment else None), segment


def from_wire(wire: WirePayload) -> Payload:
    """The payload that ``to_wire`` made ready. All its buffers can be written to and belong to the receiver alone.

    Raises:
        ProtocolError: the segment is gone, or is not what the message says.
    """
    if not wire.is_inline and wire.segment is None and not wire.inline and wire.data:
        return Payload(wire.data, [], pickle.loads(wire.handles) if wire.handles else [])
    shared = attach(wire.segment) if wire.segment else []
    if len(wire.inline) + len(shared) != len(wire.is_inline) + (not wire.data):
        raise ProtocolError(
            f"a payload of {len(wire.is_inline)} buffers came with {len(wire.inline)} inside the message and {len(shared)} "
            "in its segment. Controller and worker must run the same version of helmsman."
        )
    data = wire.data or shared.pop()
    inside, outside = iter(wire.inline), iter(shared)
    buffers = [next(inside) if is_inside else next(outside) for is_inside in wire.is_inline]
    return Payload(data, buffers, pickle.loads(wire.handles) if wire.handles else [])
