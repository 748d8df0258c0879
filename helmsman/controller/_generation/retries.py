"""Which requests go on at another instance when theirs is lost: policies as objects, the plainest
first.
"""

from __future__ import annotations

from typing import Protocol

from helmsman.api.errors import InstanceLostError
from helmsman.controller._generation.request import Ticket


class RetryPolicy(Protocol):
    """Whether a request that was lost with its instance is tried on another."""

    def may_retry(self, ticket: Ticket, error: InstanceLostError) -> bool:
        """Asked after each attempt that ended so."""


class RetryUnbegun:
    """Only what no instance has begun: the default for requests with effects outside, such as
    tools.
    """

    def may_retry(self, ticket: Ticket, error: InstanceLostError) -> bool:
        return not error.may_have_begun


class RetryGeneration:
    """Anything, so many times: generation has no effect but its result, and only one result is ever
    delivered.

    Args:
        max_attempts: of one request, not counting those that were taken back on purpose, by a
            recall or a drain.
    """

    def __init__(self, max_attempts: int = 5) -> None:
        if max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts}; expected 1 or more")
        self._max_attempts = max_attempts

    def may_retry(self, ticket: Ticket, error: InstanceLostError) -> bool:
        return not error.may_have_begun or ticket.num_losses < self._max_attempts
