"""Test clusters in ROLL's style on the inline and local schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helmsman import Scheduler, make_scheduler
from tests.compat.roll.suite import ClusterSuite

PRELOADED: dict[str, Any] = {"preload": ("torch", "tensordict", "helmsman.compat.roll_data")}


@pytest.fixture(scope="module", params=["inline", "local"])
def scheduler(request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    options = PRELOADED if request.param == "local" else {}
    with make_scheduler(request.param, num_cpus=2, num_gpus=8, **options) as made:
        yield made


class TestCluster(ClusterSuite):
    pass
