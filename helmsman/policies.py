"""Policies for routing requests, retrying calls and replacing workers."""

from helmsman.controller._generation.health import SupervisionPolicy as SupervisionPolicy
from helmsman.controller._generation.retries import RetryGeneration as RetryGeneration
from helmsman.controller._generation.retries import RetryPolicy as RetryPolicy
from helmsman.controller._generation.retries import RetryUnbegun as RetryUnbegun
from helmsman.controller._generation.routing import LeastOutstandingTokens as LeastOutstandingTokens
from helmsman.controller._generation.routing import PrefixAffinity as PrefixAffinity
from helmsman.controller._generation.routing import RoundRobin as RoundRobin
from helmsman.controller._generation.routing import RoutingPolicy as RoutingPolicy
from helmsman.controller._generation.routing import SessionAffinity as SessionAffinity
from helmsman.controller._training.recovery import RecoveryPolicy as RecoveryPolicy

__all__ = [
    "LeastOutstandingTokens",
    "PrefixAffinity",
    "RecoveryPolicy",
    "RetryGeneration",
    "RetryPolicy",
    "RetryUnbegun",
    "RoundRobin",
    "RoutingPolicy",
    "SessionAffinity",
    "SupervisionPolicy",
]
