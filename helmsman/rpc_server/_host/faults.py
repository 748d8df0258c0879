"""Faults that a worker inflicts on itself at its controller's command."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

from helmsman.api.errors import HelmsmanError
from helmsman.rpc_server._process import pause_helper
from helmsman.rpc_server._wire.messages import FaultCommand

_HELPER_ENDS_S = 5.0


class Prepared(NamedTuple):
    ended: str
    """What has lasted until now and has ended for it; '' for nothing."""
    happen: Callable[[], None]
    """Separate, so that the command is answered first: afterwards this process may be unable to.
    Returns, if at all, when the fault is over."""


class Faults:
    """The faults of one worker process. A hang or slowness takes the place of the one that
    lasts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None
        self._lasting = ""

    def prepare(self, command: FaultCommand) -> Prepared:
        if command.kind == "kill":
            return Prepared("", functools.partial(_kill, ends_raylet=command.ends_raylet))
        if not hasattr(os, "pidfd_open"):
            raise HelmsmanError(
                "a worker can be made to hang, or slow, on Linux only; kill it instead."
            )
        with self._lock:
            ended = self._end_lasting()
            helper = _start_helper(command)
            self._helper, self._lasting = helper, command.describe()
        return Prepared(ended, functools.partial(_begin, helper))

    def _end_lasting(self) -> str:
        helper, self._helper = self._helper, None
        if helper is None or helper.poll() is not None:
            return ""
        _tell(helper, b"e")
        helper.wait(_HELPER_ENDS_S)  # it was stopped by it a last time, perhaps, and goes on
        return self._lasting


def _start_helper(command: FaultCommand) -> subprocess.Popen[bytes]:
    """A helper that is ready to stop this process. It bears this worker's tag, by which it ends
    with it in any case.
    """
    arguments = [str(os.getpid()), repr(command.factor), repr(command.seconds)]
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", pause_helper.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    with helper.stdout as said:
        if said.read(1) != b"r":
            raise OSError(
                f"the helper that stops a worker ended with {helper.wait()} before it began"
            )
    return helper


def _begin(helper: subprocess.Popen[bytes]) -> None:
    _tell(helper, b"b")
    helper.wait()
    if helper.stdin is not None:
        helper.stdin.close()


def _tell(helper: subprocess.Popen[bytes], what: bytes) -> None:
    assert helper.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):
        # it has ended, and whoever waited for that has closed the pipe
        helper.stdin.write(what)


def _kill(*, ends_raylet: bool) -> None:
    if ends_raylet:
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
