"""Open phases of a run, and durations of earlier calls and phases.

Where the script has loaded OpenTelemetry's SDK, calls and phases are spans, too.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from helmsman.api.run_state import MethodDurations, PhaseSnapshot
from helmsman.rpc_server._process.recorder import Kind, Recorder

_REMEMBERED = 32
SDK = "opentelemetry.sdk.trace"
"""Module that is loaded where spans are wanted."""


class _Pauses:
    """Times without any call."""

    __slots__ = ("last_at", "longest_s")

    def __init__(self) -> None:
        self.last_at = 0.0
        """time.monotonic() of the last begin or end of a call; 0 before the first."""
        self.longest_s = 0.0


class Durations:
    """Recent durations of an operation. Thread-safe, since each step is one of the interpreter.

    The begins and ends of calls update ``pauses``.
    """

    __slots__ = ("_pauses", "_recent", "count")

    def __init__(self, pauses: _Pauses | None = None) -> None:
        self._recent: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self._pauses = pauses or _Pauses()
        self.count = 0
        """Number of all durations so far."""

    def begun(self, at: float) -> None:
        pauses = self._pauses
        last_at, pauses.last_at = pauses.last_at, at
        if at - last_at > pauses.longest_s and last_at:
            pauses.longest_s = at - last_at

    def ended(self, seconds: float, at: float) -> None:
        self._pauses.last_at = at
        self._recent.append(seconds)
        self.count += 1

    @property
    def median_s(self) -> float | None:
        """Median of the last ones in seconds; None without any."""
        recent = list(self._recent)
        return statistics.median(recent) if recent else None


class _Phase(NamedTuple):
    kind: str
    detail: str
    since: float
    waits_for: Callable[[], str]


class Activity:
    """What a run does now, and the usual duration of it; phases are recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pauses = _Pauses()
        self._calls: dict[tuple[str, str], Durations] = {}
        self._phases: dict[int, _Phase] = {}
        self._durations = collections.defaultdict[str, Durations](Durations)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self.facts: dict[str, str] = {}
        """Further figures by name, such as the step of a recipe."""

    def calls_of(self, role: str, method: str) -> Durations:
        """Return the durations of the calls of a method in a role."""
        with self._lock:
            return self._calls.setdefault((role, method), Durations(self._pauses))

    def durations(self) -> list[MethodDurations]:
        """Return the durations of all methods that were called."""
        found = []
        for (role, method), each in list(self._calls.items()):
            count, median_s = each.count, each.median_s
            if median_s is not None:
                found.append(MethodDurations(role, method, count, median_s))
        return found

    @contextlib.contextmanager
    def phase(
        self, kind: str, detail: str = "", waits_for: Callable[[], str] = lambda: ""
    ) -> Iterator[None]:
        """Record that the script is in a phase; those of one kind have comparable durations.

        ``waits_for`` describes the reason of a wait; it is called from other threads and may block.
        """
        key, since = next(self._ids), time.monotonic()
        self._phases[key] = _Phase(kind, detail, since, waits_for)
        name = self._recorder.name(f"{kind} {detail}".strip())
        self._recorder.note(Kind.PHASE, name, key)
        try:
            with phase_span(kind, detail):
                yield
        finally:
            del self._phases[key]
            self._recorder.note(Kind.PHASE_END, name, key)
            now = time.monotonic()
            self._durations[kind].ended(now - since, now)

    def phases(self, *, explain: bool) -> list[PhaseSnapshot]:
        """Return the open phases, oldest first; explaining waits may take a cluster query each."""
        now = time.monotonic()
        return [
            PhaseSnapshot(
                kind=each.kind,
                detail=each.detail,
                age_s=now - each.since,
                median_s=self._durations[each.kind].median_s,
                waits_for=each.waits_for() if explain else "",
            )
            for each in list(self._phases.values())
        ]

    @property
    def idle_s(self) -> float | None:
        """Seconds since a call last began or ended; None before the first."""
        return time.monotonic() - self._pauses.last_at if self._pauses.last_at else None

    @property
    def longest_idle_s(self) -> float:
        """The longest earlier time between such events."""
        return self._pauses.longest_s


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
