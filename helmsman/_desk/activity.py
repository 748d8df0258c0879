"""Open phases of a run, accounts of its calls, and durations of earlier calls and phases.

Where the script has loaded OpenTelemetry's SDK, phases are spans, too.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from helmsman._base.durations import Durations
from helmsman._process.recorder import Recorder
from helmsman.api.observer import CallObserver, Kind
from helmsman.api.run_state import PhaseSnapshot

_SDK = "opentelemetry.sdk.trace"
"""Module that is loaded where spans are wanted."""
_SENT = int(Kind.SENT)


class Activity:
    """The current call and phase of a run, and their usual durations; phases are recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.last_at = 0.0
        """time.monotonic() of the last begin or end of a call; 0 before the first."""
        self.longest_idle_s = 0.0
        """The longest earlier time between such events."""
        self._calls: dict[tuple[str, str], Durations] = {}
        self._phases: dict[int, Callable[[bool], PhaseSnapshot]] = {}
        self._durations = collections.defaultdict[str, Durations](Durations)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self.facts: dict[str, str] = {}
        """Further figures by name, such as the step of a recipe."""

    def calls_of(self, role: str, method: str) -> Durations:
        """Return the durations of the calls of a method in a role."""
        with self._lock:
            return self._calls.setdefault((role, method), Durations())

    def durations(self) -> dict[str, dict[str, tuple[int, float]]]:
        """Return the durations of all methods that were called, as a RunSnapshot has them."""
        found: dict[str, dict[str, tuple[int, float]]] = {}
        for (role, method), each in list(self._calls.items()):
            if (median_s := each.median_s) is not None:
                found.setdefault(role, {})[method] = each.count, median_s
        return found

    @contextlib.contextmanager
    def phase(
        self, kind: str, detail: str = "", waits_for: Callable[[], str] = lambda: ""
    ) -> Iterator[None]:
        """Record that the script is in a phase; those of one kind have comparable durations.

        ``waits_for`` describes the reason of a wait; it is called from other threads and may block.
        """
        key, since = next(self._ids), time.monotonic()

        def describe(explain: bool) -> PhaseSnapshot:
            return PhaseSnapshot(
                kind=kind,
                detail=detail,
                age_s=time.monotonic() - since,
                median_s=self._durations[kind].median_s,
                waits_for=waits_for() if explain else "",
            )

        self._phases[key] = describe
        name = self.recorder.name(f"{kind} {detail}".strip())
        slot = self.recorder.note(Kind.PHASE, name, key, 0.0, since)
        try:
            with contextlib.ExitStack() as span:  # the parent of spans that the script opens in it
                if _SDK in sys.modules:
                    trace: Any = sys.modules["opentelemetry.trace"]  # the SDK has imported it
                    tracer = trace.get_tracer("helmsman")
                    attributes = {"helmsman.detail": detail} if detail else None
                    span.enter_context(
                        tracer.start_as_current_span(f"helmsman {kind}", attributes=attributes)
                    )
                yield
        finally:
            del self._phases[key]
            now = time.monotonic()
            self.recorder.finish(slot, now, Kind.PHASE, name, key, since)
            self._durations[kind].add(now - since)

    def phases(self, *, explain: bool) -> list[PhaseSnapshot]:
        """Return the open phases, oldest first; explaining waits may take a cluster query each."""
        return [describe(explain) for describe in list(self._phases.values())]


class CallAccount(CallObserver):
    """Durations and recorded events of the calls of one method to one worker."""

    __slots__ = ("_activity", "_durations", "_label", "_recorder")

    def __init__(self, activity: Activity, role: str, worker_id: str, method: str) -> None:
        self._activity, self._recorder = activity, activity.recorder
        self._durations = activity.calls_of(role, method)
        self._label = activity.recorder.name(f"{worker_id} {method}")

    def begun(self, request_id: int, started: float) -> int:
        """See CallObserver; returns the call's slot in the recorder."""
        activity = self._activity
        last_at, activity.last_at = activity.last_at, started
        if started - last_at > activity.longest_idle_s and last_at:
            activity.longest_idle_s = started - last_at
        return self._recorder.note(_SENT, self._label, request_id, 0.0, started)

    def ended(self, slot: int, request_id: int, started: float, ok: bool) -> None:
        """See CallObserver."""
        now = self._activity.last_at = time.monotonic()
        self._durations.add(now - started)
        self._recorder.finish(slot, now if ok else -now, _SENT, self._label, request_id, started)
