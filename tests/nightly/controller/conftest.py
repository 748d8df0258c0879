"""Fixtures of all nightly tests of the controller."""

from tests.controller.conftest import engines_scheduler, forking  # noqa: F401 - fixtures
