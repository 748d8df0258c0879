"""The interface by which a scheduler reports its run to an observer, such as the operator's desk.

Schedulers, calls, rollouts and training know this interface alone. A scheduler makes an object of
the class that OBSERVER names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import IntEnum

from helmsman.api.run_state import RunReporter

OBSERVER = "helmsman._desk.run_view:RunView"
"""The class of the observer of a run, a RunObserver."""
SCRIPT = "script"
"""Stands for the worker id of the script's process."""


class Kind(IntEnum):
    """Kinds of recorded events; the comments give name, number and value."""

    SENT = 1  # A call, from its sending to its outcome: worker and method, request id.
    BEGUN = 2  # A call, as a worker executes it: 'engine.method', request id.
    PHASE = 3  # A phase of the script: kind and detail, its id.
    QUEUED = 4  # A generation request was queued: role, its number.
    ASSIGNED = 5  # It was sent: instance, its number.
    ENDED = 6  # It ended: state, its number; value: new tokens.
    WEIGHTS = 7  # An engine has new weights: engine, version.
    STATE = 8  # A change of state: a text.
    OPEN = 9  # A wait of an episode, session, tool call or reward: kind and wait, its number.


class CallObserver:
    """Receives the calls of one method to one worker; this default ignores them.

    Its methods are part of the cost of a call, and may run on any thread.
    """

    __slots__ = ()

    def begun(self, request_id: int, started: float) -> int:
        """Report a call that is about to be sent.

        Args:
            request_id: Number of the request, unique in this process.
            started: time.monotonic() at its start.

        Returns:
            A number that ``ended`` gets.
        """
        return 0

    def ended(self, slot: int, request_id: int, started: float, ok: bool) -> None:
        """Report the outcome of a call.

        Args:
            slot: The result of ``begun``.
            request_id: As in ``begun``.
            started: As in ``begun``.
            ok: Whether it is a result; else an error.
        """


UNOBSERVED = CallObserver()


class RunObserver(RunReporter):
    """Receives the reports of a scheduler and of the script about a run; this one ignores them."""

    def begin(self) -> None:
        """Report that the first workers are about to start. The run's log directory exists."""

    def calls_of(self, role: str, worker_id: str, method: str) -> CallObserver:
        """Return the observer of the calls of a method to a worker; asked once for each pair."""
        return UNOBSERVED

    def operation(
        self, kind: str, detail: str, waits_for: Callable[[], str] = lambda: ""
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context that is open while the scheduler performs an operation.

        Args:
            kind: Name of the operation.
            detail: The roles.
            waits_for: Describes the reason of a wait; called from other threads, and may block.
        """
        return contextlib.nullcontext()

    def close(self) -> None:
        """Report that the run has ended. Idempotent."""
