"""CallAccounts: counts, durations and recorded events of the calls to one worker."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from helmsman.controller._node.activity import SDK, Durations, record_call
from helmsman.rpc_server._process.recorder import Kind, Recorder

_SENT = int(Kind.SENT)
_NO_RECORDER = Recorder("")
"""Recorder of workers without a run; no file has its events."""
_modules = sys.modules


class CallAccount:
    """Account of the calls of one method to one worker.

    Args:
        worker_id: The worker.
        method: The method.
        recorder: Flight recorder of the script.
        durations: Receives the durations of the calls.
    """

    __slots__ = ("_durations", "_label", "_method", "_recorder", "_worker_id")

    def __init__(
        self, worker_id: str, method: str, recorder: Recorder, durations: Durations
    ) -> None:
        self._worker_id, self._method = worker_id, method
        self._recorder, self._durations = recorder, durations
        self._label = recorder.name(f"{worker_id} {method}")

    def begun(self, request_id: int, started: float) -> int:
        """Count a call that is sent; returns its slot in the recorder."""
        self._durations.begun(started)
        return self._recorder.note(_SENT, self._label, request_id, 0.0, started)

    def ended(self, slot: int, request_id: int, started: float, ok: bool) -> None:
        """Count an outcome: a result if ``ok``, else an error."""
        now = time.monotonic()
        self._durations.ended(now - started, now)
        end = now if ok else -now
        self._recorder.finish(slot, end, _SENT, self._label, request_id, started)
        if SDK in _modules:
            record_call(self._worker_id, self._method, now - started, ok=ok)


class CallAccounts(dict[str, CallAccount]):
    """Accounts of the calls to one worker, by method.

    Args:
        worker_id: The worker.
    """

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._recorder = _NO_RECORDER
        self._durations_of: Callable[[str], Durations] = lambda method: Durations()

    def join(self, recorder: Recorder, durations_of: Callable[[str], Durations]) -> None:
        """Count the calls for a run from now on.

        Args:
            recorder: Flight recorder of the script.
            durations_of: Returns the durations of the calls of a method in the worker's role.
        """
        self._recorder, self._durations_of = recorder, durations_of
        self.clear()

    def __missing__(self, method: str) -> CallAccount:
        durations = self._durations_of(method)
        found = CallAccount(self._worker_id, method, self._recorder, durations)
        return self.setdefault(method, found)
