"""What an engine may know of the worker that it is made in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import msgspec


class WorkerContext(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as its engines see it."""

    worker_id: str
    node: str
    """Address of its node."""
    ports: tuple[int, ...] = ()
    """Leased to it (``SchedulingSpec.port_count``), for its engines to bind."""


_current: ContextVar[WorkerContext | None] = ContextVar("helmsman_worker_context", default=None)


def worker_context() -> WorkerContext | None:
    """The worker in which an engine is being constructed; None anywhere else, so an engine asks in its ``__init__``."""
    return _current.get()


@contextlib.contextmanager
def within(context: WorkerContext) -> Iterator[None]:
    """Construct an engine of this worker."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
