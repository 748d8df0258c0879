"""Marks that select the backends of a test; conftest.py declares and applies them."""

import pytest

needs_processes = pytest.mark.not_on("inline")
"""For tests that kill, stop or tell apart workers, which `inline` runs in the tests' process."""
only_local = pytest.mark.not_on("inline", "ray")
only_ray = pytest.mark.not_on("inline", "local")
ray_smoke = pytest.mark.ray_smoke
"""For quick tests whose result depends on Ray."""
