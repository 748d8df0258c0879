"""CallAccounts: counts, durations and recorded events of the calls to one worker."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from helmsman.controller._node.activity import Durations
from helmsman.controller._node.spans import SDK, record_call
from helmsman.rpc_server._process.recorder import Kind, Recorder

_SENT, _REPLIED = int(Kind.SENT), int(Kind.REPLIED)
_NO_RECORDER = Recorder("")
"""Recorder of workers without a run; no file has its events."""


class CallAccounts:
    """Accounts of the calls to one worker.

    Args:
        worker_id: The worker.
    """

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._recorder = _NO_RECORDER
        self._durations_of: Callable[[str], Durations] = lambda method: Durations()
        self._methods: dict[str, tuple[int, Durations]] = {}
        """Method -> its name in the recorder, and its durations."""

    def join(self, recorder: Recorder, durations_of: Callable[[str], Durations]) -> None:
        """Count the calls for a run from now on.

        Args:
            recorder: Flight recorder of the script.
            durations_of: Returns the durations of the calls of a method in the worker's role.
        """
        self._recorder, self._durations_of = recorder, durations_of
        self._methods.clear()

    def begun(self, request_id: int, method: str, started: float) -> None:
        label, durations = self._methods.get(method) or self._enter(method)
        durations.begun(started)
        self._recorder.note(_SENT, label, request_id)

    def ended(self, request_id: int, method: str, started: float, ok: bool) -> None:
        """Count an outcome: a result if ``ok``, else an error."""
        now = time.monotonic()
        label, durations = self._methods.get(method) or self._enter(method)
        durations.ended(now - started, now)
        self._recorder.note(_REPLIED, label, request_id, ok)
        if SDK in sys.modules:
            record_call(self._worker_id, method, now - started, ok=ok)

    def _enter(self, method: str) -> tuple[int, Durations]:
        label = self._recorder.name(f"{self._worker_id} {method}")
        self._methods[method] = found = label, self._durations_of(method)
        return found
