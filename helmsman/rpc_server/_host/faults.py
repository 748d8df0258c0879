"""Injected faults: a worker kills, stops or slows itself on a command of its controller."""

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
    """The previous fault, which this one has ended; '' if there was none."""
    happen: Callable[[], None]
    """Executes the fault. Separate, so that the reply is sent first, since the process may be
    unable to afterwards. Returns, if at all, when the fault is over.
    """


class Faults:
    """Faults of one worker process. A new hang or slowdown replaces the previous one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None
        self._lasting = ""

    def prepare(self, command: FaultCommand) -> Prepared:
        if command.kind == "kill":
            return Prepared("", functools.partial(_kill, ends_raylet=command.ends_raylet))
        if not hasattr(os, "pidfd_open"):
            raise HelmsmanError("a worker can be stopped or slowed on Linux only; kill it instead.")
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
        helper.wait(_HELPER_ENDS_S)  # this process may be stopped a last time meanwhile
        return self._lasting


def _start_helper(command: FaultCommand) -> subprocess.Popen[bytes]:
    """Start a helper that can stop this process, and wait until it is ready.

    It carries this worker's tag, so it always ends with the worker.
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
                f"the helper that stops a worker exited with status {helper.wait()} at its start"
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
        # The helper has ended, and the thread that waited for it has closed the pipe.
        helper.stdin.write(what)


def _kill(*, ends_raylet: bool) -> None:
    if ends_raylet:
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
