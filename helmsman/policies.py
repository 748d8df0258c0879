"""Policies for routing requests, retrying those of lost instances, and replacing workers."""

from helmsman.controller._rollout.health import SupervisionPolicy as SupervisionPolicy
from helmsman.controller._rollout.retries import RetryGeneration as RetryGeneration
from helmsman.controller._rollout.retries import RetryPolicy as RetryPolicy
from helmsman.controller._rollout.retries import RetryUnbegun as RetryUnbegun
from helmsman.controller._rollout.routing import LeastOutstandingTokens as LeastOutstandingTokens
from helmsman.controller._rollout.routing import PrefixAffinity as PrefixAffinity
from helmsman.controller._rollout.routing import RoundRobin as RoundRobin
from helmsman.controller._rollout.routing import RoutingPolicy as RoutingPolicy
from helmsman.controller._rollout.routing import SessionAffinity as SessionAffinity
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
