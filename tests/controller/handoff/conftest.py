"""Fixtures of the tests of DeviceHandoff."""

from tests.controller.handoff_world import pair, shared_pair  # noqa: F401 - fixtures
