"""The contract of a transport, which carries requests to one worker."""

from __future__ import annotations

import abc
import os
import pickle
from typing import Protocol

import msgspec

from helmsman._base.readiness import Bell, Leader
from helmsman._process.safe_files import open_regular
from helmsman._wire.codec import Payload, decode
from helmsman._wire.messages import Reply
from helmsman._wire.wire import Outgoing
from helmsman.api import errors

LOG_TAIL_LINES = 50


class TransportLostError(Exception):
    """The worker has died or cannot be reached.

    Only transports raise it, and only pending calls receive it.
    """


class Ending(msgspec.Struct, frozen=True):
    """The cause and status of a worker's end, as far as known."""

    cause: str
    """Predicate of a sentence about the worker, such as 'was ended by SIGKILL'."""
    exit_code: int | None = None
    exit_signal: int | None = None
    log_tail: str = ""
    log_path: str = ""
    """File of ``log_tail``, if it is not the worker's own log."""
    aftermath: str = ""
    """Becomes ``WorkerFailedError.aftermath``."""


def error_in(answer: Payload) -> errors.HelmsmanError:
    """Decode the error in a reply; its cause is the original exception if that unpickles here."""
    try:
        error: errors.HelmsmanError = decode(answer)
    except errors.HelmsmanError as unreadable:
        return unreadable
    original = getattr(error, "original", None)
    if isinstance(error, errors.EngineCallError) and original is not None:
        error.original = None
        try:
            error.__cause__ = pickle.loads(original)
        # Unpickling runs foreign code; our error has the original's text
        except (Exception, SystemExit):  # noqa: BLE001
            error.__cause__ = None
    return error


class Awaited(Protocol):
    """Receives the outcome of one request; called once, on the event loop or in ``read``."""

    def replied(self, reply: Reply, payload: Payload) -> None:
        """The worker has replied."""

    def failed(self, error: Exception) -> None:
        """No reply will come; ``error`` is a TransportLostError if the worker is lost."""


class Transport(abc.ABC):
    """Carries requests to one worker, each at most once.

    Engine work (``ENGINE_WORK``) arrives in the order of the ``post`` calls, however long each
    takes to pack: ranks that are called in one order must enter their collectives in that order.
    Control verbs do not queue.
    """

    has_connection = False
    """Whether a caller can read it."""

    @abc.abstractmethod
    def post(self, outgoing: Outgoing, awaited: Awaited, leader: Leader | None = None) -> None:
        """Send a request from any thread; ``awaited`` receives its outcome, without a time limit.

        Args:
            outgoing: The request.
            awaited: Receives its outcome.
            leader: Reads the outcome if no other request is pending: the bell of the calling
                thread, which then calls ``read``, or the readers of its event loop.

        Raises:
            TransportLostError: The worker has died or cannot be reached.
            ProtocolError: The request cannot be encoded.
            WorkerBacklogError: Too many bytes already wait for the worker.
        """

    # A transport without a connection has nothing to read.
    def read(self, bell: Bell, limit_s: float) -> None:  # noqa: B027
        """Read the outcome of a posted request on this thread.

        It returns, possibly without the outcome, once the limit has passed or another thread reads.
        """

    def hand_back(self) -> None:  # noqa: B027
        """Let the transport's own event loop read again, for a caller that no longer waits."""

    # A transport without a connection has nothing to replace.
    def renew(self, silent_since: float) -> None:  # noqa: B027
        """Replace a connection that has been silent since this time, although the worker runs.

        The time is that of time.monotonic().
        """

    @abc.abstractmethod
    async def ending(self) -> Ending:
        """Return how the worker ended, within about a second; called after TransportLostError."""

    async def observe(self, limit_s: float) -> bytes:
        """Observe the worker from outside its process, for ``pulse.read``; b'' without a result."""
        return b""

    # By default the worker ends in ``kill`` only.
    async def wait_ended(self, limit_s: float) -> None:  # noqa: B027
        """Wait at most ``limit_s`` seconds for the worker to end by itself."""

    @abc.abstractmethod
    async def kill(self) -> None:
        """Kill the worker's process and wait until it has ended. Idempotent."""


class WorkerProcess(Protocol):
    """The process behind a channel; the methods are those of Transport."""

    async def ending(self, lost_because: str) -> Ending:
        """Return how the process ended.

        A process that is still running after its channel was given up is killed; ``lost_because``
        is then the cause.
        """

    async def observe(self, limit_s: float) -> bytes: ...

    async def wait_ended(self, limit_s: float) -> None: ...

    async def kill(self) -> None: ...


def split_returncode(status: int | None) -> tuple[int | None, int | None]:
    """(exit code, signal) of a subprocess.Popen.returncode; both None if that is None."""
    if status is None:
        return None, None
    return (status, None) if status >= 0 else (None, -status)


def describe_exit(exit_code: int | None, exit_signal: int | None, num_oom_kills: int = 0) -> str:
    """Describe how a process ended, as the predicate of a sentence.

    ``exit_code`` is None after a signal or if unknown. ``num_oom_kills`` counts the processes in
    its memory cgroup that the kernel's OOM killer has ended since it started.
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
        return "was ended by SIGKILL (sender unknown)"
    if exit_code is not None:
        return f"exited with code {exit_code}"
    return "ended with an unknown exit status"


def log_size(path: str) -> int:
    """Size of a log file in bytes; 0 if it cannot be read.

    A new process appends to the log, so this is where its output begins.
    """
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def tail_of(path: str, num_lines: int = LOG_TAIL_LINES, *, start: int = 0) -> str:
    """Last lines of a log file, at most 64 KB; '' if it cannot be read.

    The first ``start`` bytes belong to earlier processes. A file shorter than that has been rotated
    and is read from its beginning.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start if start <= size else 0, size - 64 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])
