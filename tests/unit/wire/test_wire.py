"""Test that a session stays whole when a signal handler interrupts it anywhere."""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from helmsman._wire import wire
from helmsman._wire.wire import Session

NUM_KEPT = 3


class Interrupt(BaseException):
    """Raised as by a signal handler."""


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Interrupt a call before its n-th instruction in the module; False if it has fewer."""
    left = at

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != wire.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            left -= 1
            if not left:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def message(num_received: int, body: bytes = b"") -> bytes:
    """Return a message, without its length, that confirms others."""
    return struct.pack("!q", num_received) + body


def bodies(session: Session, num_received: int) -> list[bytes]:
    """Return the bodies that a resumed session sends."""
    return [each[12:] for each in session.resume(num_received)]


def test_session_interrupted_while_it_takes() -> None:
    for at in itertools.count(1):
        session = Session()
        for number in range(NUM_KEPT):
            session.keep(b"%d" % number)
        was_interrupted = interrupted(lambda: session.take(message(NUM_KEPT - 1)), at)  # noqa: B023
        session.take(message(NUM_KEPT - 1))
        session.keep(b"last")
        assert session.num_kept_bytes == len(b"2") + len(b"last") + 2 * 8
        assert bodies(session, NUM_KEPT - 1) == [b"2", b"last"]
        session.take(message(NUM_KEPT + 1))
        assert session.num_kept_bytes == 0
        if not was_interrupted:
            return


def test_session_interrupted_while_it_keeps() -> None:
    for at in itertools.count(1):
        session = Session()
        session.keep(b"first")
        was_interrupted = interrupted(lambda: session.keep(b"second"), at)  # noqa: B023
        kept = bodies(session, 0)
        assert kept in ([b"first"], [b"first", b"second"])
        session.keep(b"third")
        assert bodies(session, len(kept)) == [b"third"]
        session.take(message(len(kept) + 1))
        assert session.num_kept_bytes == 0
        if not was_interrupted:
            return
