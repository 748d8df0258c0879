"""The fixtures of tests/agents."""

from tests.agents.conftest import gateway, rollout, scheduler, toy

__all__ = ["gateway", "rollout", "scheduler", "toy"]
