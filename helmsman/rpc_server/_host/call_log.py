"""CallLog: shows and records the calls of a worker's engine thread or event loop."""

from __future__ import annotations

from helmsman.rpc_server._process.pulse import CallRecord
from helmsman.rpc_server._process.recorder import Kind, Recorder

_BEGUN, _DONE = int(Kind.BEGUN), int(Kind.DONE)


class CallLog:
    """Shows the running call to observers outside the process, and records begins and ends.

    Args:
        recorder: The process's flight recorder.
        shown: Page of the call that began last; None where nothing observes the process.
        is_serial: Whether a call ends before the next one begins.
    """

    def __init__(self, recorder: Recorder, shown: CallRecord | None, *, is_serial: bool) -> None:
        self._recorder, self._shown, self._is_serial = recorder, shown, is_serial
        self._names: dict[str, int] = {}

    def begun(self, name: str, request_id: object, since: float) -> None:
        if self._shown is not None:
            self._shown.begun(name, since)
        if type(request_id) is int:
            number = self._names.get(name)
            if number is None:
                number = self._names[name] = self._recorder.name(name)
            self._recorder.note(_BEGUN, number, request_id)

    def ended(self, name: str, request_id: object) -> None:
        if self._is_serial and self._shown is not None:
            self._shown.ended()
        if type(request_id) is int:
            self._recorder.note(_DONE, self._names[name], request_id)
