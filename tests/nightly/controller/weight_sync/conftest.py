"""Fixtures of the nightly tests of weight syncs."""

from tests.controller.weight_sync.conftest import shared, world  # noqa: F401 - fixtures
