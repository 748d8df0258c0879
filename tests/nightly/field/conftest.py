"""The fixtures of tests/field."""

from tests.field.conftest import (  # noqa: F401 - fixtures
    engines_scheduler,
    forking,
    gate,
    local,
    one_thread,
    role,
    world,
)
