"""Values that stay where they are, and the handles that stand for them."""

from __future__ import annotations

import uuid
from typing import Any, Protocol

from helmsman.api.batch import Batch
from helmsman.api.scheduler import ResultHandle
from helmsman.rpc_server.codec import Payload


class HandleStore(Protocol):
    """Where values stay for which a handle stands."""

    def put(self, handle_id: str, payload: Payload) -> Any:
        """Keep a packed value; returns its location, which travels in the handle."""

    def fetch(self, handle: ResultHandle) -> Payload:
        """The packed value of a handle, of this process or another. Raises HandleLostError."""

    def drop(self, handle_id: str) -> None:
        """Forget a value; nothing happens when it is not known."""


def keep(store: HandleStore, worker_id: str, payload: Payload, value: Any) -> ResultHandle:
    """Keep a packed value and return the handle for it."""
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
