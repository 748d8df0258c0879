"""Fixtures of the nightly tests of weight syncs."""

from tests.controller.weights.conftest import shared, world  # noqa: F401 - fixtures
