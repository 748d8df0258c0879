"""Policies that decide whether a request of a lost instance is retried; RequestFlow asks them."""

from __future__ import annotations

from typing import Protocol

from helmsman.api.errors import InstanceLostError
from helmsman.controller._rollout.request import Ticket


class RetryPolicy(Protocol):
    """Decides whether a request that was lost with its instance is retried on another one."""

    def may_retry(self, ticket: Ticket, error: InstanceLostError) -> bool:
        """Return whether to retry; called after each attempt that ended with a lost instance.

        Args:
            ticket: The request and the state of its attempts.
            error: The loss; ``may_have_begun`` is False when no instance has started the request.

        Returns:
            True to queue the request again, False to fail it with ``error``.
        """


class RetryUnbegun(RetryPolicy):
    """Retry only requests that no instance has started.

    This is the default. It is safe for requests with side effects, such as tool calls.
    """

    def may_retry(self, ticket: Ticket, error: InstanceLostError) -> bool:
        return not error.may_have_begun


class RetryGeneration(RetryPolicy):
    """Retry every lost request, up to a limit on started attempts.

    This is safe for plain generation: it has no side effects, and each request delivers one result.

    Args:
        max_attempts: Lost attempts after which a request that may have started fails. Attempts
            ended by a recall or a drain do not count.

    Raises:
        ValueError: If ``max_attempts`` is below 1.
    """

    def __init__(self, max_attempts: int = 5) -> None:
        if max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts}; expected 1 or more")
        self._max_attempts = max_attempts

    def may_retry(self, ticket: Ticket, error: InstanceLostError) -> bool:
        return not error.may_have_begun or ticket.num_losses < self._max_attempts
