"""Test clusters in ROLL's style on Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helmsman import Scheduler, make_scheduler
from tests.compat.roll.suite import ClusterSuite


@pytest.fixture(scope="module")
def scheduler() -> Iterator[Scheduler]:
    with make_scheduler("ray", num_cpus=2, num_gpus=8, address="local") as made:
        yield made


class TestCluster(ClusterSuite):
    pass
