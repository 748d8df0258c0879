"""Test that the engines' processes end, and free the cluster, after their driver was killed."""

from __future__ import annotations

import os
import signal

import pytest

from tests.contract.helpers import (
    WAIT,
    Driver,
    is_running,
)
from tests.multinode.families import driver, wait_end_of

__all__ = ["driver"]
pytestmark = pytest.mark.usefixtures("left_as_found")


@pytest.mark.parametrize("driver", [WAIT], indirect=True)
def test_driver_killed_after_worker(driver: Driver) -> None:
    facts = driver.facts()
    os.kill(facts["pids"]["worker of 0"], signal.SIGKILL)
    wait_end_of(facts, "of 0", facts["memory"][:1])
    assert all(is_running(pid) for name, pid in facts["pids"].items() if name.endswith("of 1"))
    os.kill(driver.process.pid, signal.SIGKILL)
    driver.wait()
    wait_end_of(facts, "of 1", facts["memory"])
