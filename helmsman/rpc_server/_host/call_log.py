"""CallLog: shows and records the calls of a worker's engine thread or event loop."""

from __future__ import annotations

import time

from helmsman.rpc_server._process.pulse import CallRecord, shown_name
from helmsman.rpc_server._process.recorder import Kind, Recorder

_BEGUN = int(Kind.BEGUN)


class CallLog:
    """Shows the running call to observers outside the process, and records begins and ends.

    Args:
        recorder: The process's flight recorder.
        shown: Page of the call that began last; None where nothing observes the process.
        is_serial: Whether a call ends before the next one begins.
    """

    def __init__(self, recorder: Recorder, shown: CallRecord | None, *, is_serial: bool) -> None:
        self._recorder, self._shown, self._is_serial = recorder, shown, is_serial
        self._names: dict[str, tuple[int, bytes]] = {}
        """Name of a call -> its number in the recorder, and its text on the page."""

    def begun(self, name: str, request_id: object, since: float) -> int:
        """Note a begin; returns the slot in the recorder, 0 if only the page shows the call."""
        found = self._names.get(name)
        if found is None:
            found = self._names[name] = self._recorder.name(name), shown_name(name)
        number, text = found
        if self._shown is not None:
            self._shown.begun(text, since)
        if type(request_id) is int:
            return self._recorder.note(_BEGUN, number, request_id, 0.0, since)
        return 0

    def ended(self, slot: int, name: str, request_id: object, since: float) -> None:
        """Note the end of a call; the arguments are the result and those of ``begun``."""
        if self._is_serial and self._shown is not None:
            self._shown.ended()
        if type(request_id) is int:
            number, _ = self._names[name]
            self._recorder.finish(slot, time.monotonic(), _BEGUN, number, request_id, since)
