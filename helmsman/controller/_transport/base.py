"""The way of requests to one worker, as the rest of the controller sees it."""

from __future__ import annotations

import abc
import os
import pickle
from typing import Protocol

import msgspec

from helmsman.api import errors
from helmsman.rpc_server._process.safe_files import open_regular
from helmsman.rpc_server._wire.codec import Payload, decode
from helmsman.rpc_server._wire.messages import Reply
from helmsman.rpc_server._wire.wire import Outgoing

LOG_TAIL_LINES = 50


class TransportLostError(Exception):
    """The worker's process has ended, or cannot be reached; only a transport raises it and only a
    pending call sees it.
    """


class Ending(msgspec.Struct, frozen=True):
    """How a worker ended, as far as it can be known."""

    cause: str
    """Part of a sentence: 'was ended by SIGKILL'."""
    exit_code: int | None = None
    exit_signal: int | None = None
    log_tail: str = ""
    log_path: str = ""
    """The log of that tail, where it is not the worker's own."""
    aftermath: str = ""
    """As WorkerFailedError's."""


def error_in(answer: Payload) -> errors.HelmsmanError:
    """The error in a reply, with the original exception as its cause where that can be unpickled
    here.
    """
    try:
        error: errors.HelmsmanError = decode(answer)
    except errors.HelmsmanError as unreadable:
        return unreadable
    original = getattr(error, "original", None)
    if isinstance(error, errors.EngineCallError) and original is not None:
        error.original = None
        try:
            error.__cause__ = pickle.loads(original)
        # Unpickling runs its own code; our error has its text
        except (Exception, SystemExit):  # noqa: BLE001
            error.__cause__ = None
    return error


class Awaited(Protocol):
    """The receiver of a reply; called once, on the event loop."""

    def replied(self, reply: Reply, payload: Payload) -> None:
        """The worker has answered."""

    def failed(self, error: Exception) -> None:
        """It will not; TransportLostError when it is gone."""


class Transport(abc.ABC):
    """Carries requests to one worker. A request arrives at most once, whatever happens.

    Engine work (``ENGINE_WORK``) arrives in the order in which ``post`` was called, however long
    each takes to be packed: ranks that were called in one order must meet in their collectives in
    that order. Control verbs wait for nothing.
    """

    @abc.abstractmethod
    def post(self, outgoing: Outgoing, awaited: Awaited) -> None:
        """Send a request, whose reply is for ``awaited``; from any thread. It never times out by
        itself. Raises: TransportLostError, ProtocolError, WorkerBacklogError.
        """

    # A transport without a connection has none to replace
    def renew(self, silent_since: float) -> None:  # noqa: B027
        """Replace a connection by which nothing has come since then (time.monotonic()), though the
        worker runs.
        """

    @abc.abstractmethod
    async def ending(self) -> Ending:
        """How the worker ended; called after TransportLostError, answers within about a second."""

    async def observe(self, limit_s: float) -> bytes:
        """Observe the worker from outside its process, for ``pulse.read``; b'' when there is no
        observation in time.
        """
        return b""

    # Where ending takes no time, there is nothing to wait for
    async def wait_ended(self, limit_s: float) -> None:  # noqa: B027
        """Wait until the worker has ended by itself, at most ``limit_s`` seconds."""

    @abc.abstractmethod
    async def kill(self) -> None:
        """End the worker's process at once and await its end. Idempotent."""


def split_returncode(status: int | None) -> tuple[int | None, int | None]:
    """(exit code, signal) of a subprocess.Popen.returncode; both are None where it is None."""
    if status is None:
        return None, None
    return (status, None) if status >= 0 else (None, -status)


def describe_exit(exit_code: int | None, exit_signal: int | None, num_oom_kills: int = 0) -> str:
    """How a process ended, as part of a sentence.

    ``exit_code`` is None after a signal, and where it is not known; ``num_oom_kills`` counts
    processes that the kernel's OOM killer has ended around it since it started.
    """
    if exit_signal is not None:
        name = errors.signal_name(exit_signal)
        if name != "SIGKILL":
            return f"was ended by {name}"
        if num_oom_kills:
            return (
                "was ended by SIGKILL (most likely by the kernel's OOM killer, which has ended "
                f"{num_oom_kills} process{'es' if num_oom_kills > 1 else ''} of its memory cgroup "
                "since it started)"
            )
        return "was ended by SIGKILL (by whom is not known)"
    if exit_code is not None:
        return f"exited with code {exit_code}"
    return "ended without leaving its exit status"


def log_size(path: str) -> int:
    """Bytes of a log file; 0 when it cannot be read. A process that starts appends to what is there
    of earlier ones.
    """
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def tail_of(path: str, num_lines: int = LOG_TAIL_LINES, *, start: int = 0) -> str:
    """The last lines of a log file, of at most 64 KB; '' when it cannot be read.

    ``start`` bytes at its beginning are of earlier processes; a shorter file has been rotated and
    has none.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start if start <= size else 0, size - 64 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])
