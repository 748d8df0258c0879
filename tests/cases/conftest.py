"""Schedulers with worker processes, shared by the cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helmsman import Scheduler, make_scheduler

OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"preload": ()},
    "ray": {"preload": (), "address": "local", "num_cpus": 16},
}


@pytest.fixture(scope="package", params=list(OPTIONS))
def backend(request: pytest.FixtureRequest) -> str:
    """Name of the scheduler."""
    return str(request.param)


@pytest.fixture(scope="package")
def scheduler(backend: str) -> Iterator[Scheduler]:
    """Provide a scheduler that all tests share."""
    with make_scheduler(backend, **OPTIONS[backend]) as made:
        yield made
