"""OpenTelemetry spans of phases and calls, where the script has loaded OpenTelemetry's SDK."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

SDK = "opentelemetry.sdk.trace"
"""Module that is loaded where spans are wanted."""


def phase_span(kind: str, detail: str) -> contextlib.AbstractContextManager[Any]:
    """Open a span for a phase; it is the parent of spans that the script opens in it.

    Args:
        kind: Name of the span.
        detail: Becomes an attribute.
    """
    if SDK not in sys.modules:
        return contextlib.nullcontext()
    attributes = {"helmsman.detail": detail} if detail else None
    span: contextlib.AbstractContextManager[Any] = _tracer().start_as_current_span(
        f"helmsman {kind}", attributes=attributes
    )
    return span


def record_call(worker_id: str, method: str, seconds: float, *, ok: bool) -> None:
    """Record a span for a call that has just ended; only with the SDK.

    Args:
        worker_id: The worker.
        method: The method.
        seconds: Duration of the call.
        ok: Whether it returned a result.
    """
    end_ns = time.time_ns()
    span = _tracer().start_span(
        f"helmsman call {method}",
        start_time=end_ns - int(seconds * 1e9),
        attributes={"helmsman.worker": worker_id, "helmsman.ok": ok},
    )
    span.end(end_ns)


def _tracer() -> Any:
    trace: Any = sys.modules["opentelemetry.trace"]  # the SDK has imported it
    return trace.get_tracer("helmsman")
