"""Test that the engines' processes end, and free the cluster, after their driver was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.helpers import (
    WAIT,
    WITH_FAMILY,
    Driver,
    has_shared_memory,
    is_running,
    wait_gone,
    wait_until,
)
from tests.multinode.conftest import Nodes

pytestmark = pytest.mark.usefixtures("left_as_found")


@pytest.fixture
def driver(nodes: Nodes, tmp_path: Path) -> Iterator[Driver]:
    """A script with two families on the cluster."""
    script = WITH_FAMILY.replace("make()", f"make(address={nodes.address!r})") + WAIT
    made = Driver(tmp_path, "ray", script)
    yield made
    made.close()


def test_driver_killed_after_worker(driver: Driver) -> None:
    facts = driver.facts()
    first = {name: pid for name, pid in facts["pids"].items() if name.endswith("of 0")}
    os.kill(first["worker of 0"], signal.SIGKILL)
    wait_gone(first)
    wait_until(
        lambda: not has_shared_memory(facts["memory"][:1]),
        "the shared memory is removed",
        limit_s=10.0,
    )
    assert all(is_running(pid) for name, pid in facts["pids"].items() if name not in first)
    os.kill(driver.process.pid, signal.SIGKILL)
    driver.wait()
    wait_gone(facts["pids"])
    wait_until(
        lambda: not has_shared_memory(facts["memory"]), "all shared memory is removed", limit_s=10.0
    )
