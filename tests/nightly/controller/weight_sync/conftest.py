"""Fixtures of the nightly tests of weight syncs."""

from tests.controller.weight_sync.conftest import world  # noqa: F401 - fixture
