"""OpenTelemetry spans of phases and calls, where the script has loaded OpenTelemetry's SDK."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

SDK = "opentelemetry.sdk.trace"
"""Module that is loaded where spans are wanted."""


def phase_span(kind: str, detail: str) -> contextlib.AbstractContextManager[Any]:
    """Open a span for a phase; it is the parent of spans that the script opens in it."""
    if SDK not in sys.modules:
        return contextlib.nullcontext()
    attributes = {"helmsman.detail": detail} if detail else None
    span: contextlib.AbstractContextManager[Any] = _tracer().start_as_current_span(
        f"helmsman {kind}", attributes=attributes
    )
    return span


def record_call(worker_id: str, method: str, seconds: float, *, ok: bool) -> None:
    """Record a span for a call that has just ended; only with the SDK."""
    end_ns = time.time_ns()
    attributes = {"helmsman.worker": worker_id, "helmsman.ok": ok}
    start_ns = end_ns - int(seconds * 1e9)
    name = f"helmsman call {method}"
    _tracer().start_span(name, start_time=start_ns, attributes=attributes).end(end_ns)


def _tracer() -> Any:
    trace: Any = sys.modules["opentelemetry.trace"]  # the SDK has imported it
    return trace.get_tracer("helmsman")
