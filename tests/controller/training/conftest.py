"""Fixtures of the tests of training."""

from tests.controller.recovery_world import scheduler, start, unbroken  # noqa: F401 - fixtures
