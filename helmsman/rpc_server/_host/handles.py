"""Results that stay in their worker, and the handles that refer to them."""

from __future__ import annotations

import uuid
from typing import Any, Protocol

import msgspec

from helmsman._wire.codec import Payload
from helmsman._wire.segments import ShmSegment
from helmsman._wire.wire import WirePayload, from_wire, to_wire
from helmsman.api.batch import Batch
from helmsman.api.errors import HandleLostError, ProtocolError
from helmsman.api.scheduler import ResultHandle


class HandleStore(Protocol):
    """Storage for values behind handles."""

    def put(self, handle_id: str, payload: Payload) -> Any:
        """Keep a packed value; returns its location, which the handle contains."""

    def fetch(self, handle: ResultHandle) -> Payload:
        """Return the packed value of a handle of any process. Raises HandleLostError."""

    def drop(self, handle_id: str) -> None:
        """Delete a value; does nothing if it is unknown."""


class SegmentStore:
    """Keeps results in shared memory, where any process of this user can map them."""

    def __init__(self) -> None:
        self._kept: dict[str, ShmSegment | None] = {}

    def put(self, handle_id: str, payload: Payload) -> bytes:
        wire, self._kept[handle_id] = to_wire(payload, threshold=0)
        return msgspec.msgpack.encode(wire)

    def fetch(self, handle: ResultHandle) -> Payload:
        """Map the value, in any process of this machine, while its owner lives and keeps it."""
        try:
            return from_wire(msgspec.msgpack.decode(handle.location, type=WirePayload))
        except ProtocolError as error:
            raise HandleLostError(
                worker_id=handle.worker_id, handle_id=handle.id, reason=str(error)
            ) from error

    def drop(self, handle_id: str) -> None:
        segment = self._kept.pop(handle_id, None)
        if segment is not None:
            segment.close()


def keep(store: HandleStore, worker_id: str, payload: Payload, value: Any) -> ResultHandle:
    handle_id = uuid.uuid4().hex
    try:
        length = len(value)
    except TypeError:  # it has none
        length = None
    return ResultHandle(
        id=handle_id,
        worker_id=worker_id,
        location=store.put(handle_id, payload),
        nbytes=payload.nbytes,
        summary=f"{type(value).__qualname__} of {payload.nbytes} bytes",
        type_name="Batch" if isinstance(value, Batch) else type(value).__qualname__,
        length=length,
        num_padding=value.num_padding if isinstance(value, Batch) else 0,
    )
