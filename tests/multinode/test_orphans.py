"""However a controller on someone's cluster ends, its engines' processes exit within 10 s, and the
cluster has all back.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("left_as_found")]


@pytest.fixture
def driver(nodes: Nodes, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A script with two families on the cluster; the parameter is how the script goes on."""
    script = WITH_FAMILY.replace("make()", f"make(address={nodes.address!r})") + request.param
    made = Driver(tmp_path, "ray", script)
    yield made
    made.close()


def _wait_end_of(facts: dict[str, Any], name: str, memory: list[str]) -> None:
    wait_gone({each: pid for each, pid in facts["pids"].items() if each.endswith(name)})
    wait_until(
        lambda: not has_shared_memory(memory), "the engines' shared memory is removed", limit_s=10.0
    )


@pytest.mark.parametrize("driver", [WAIT], indirect=True)
def test_driver_killed_after_worker(driver: Driver) -> None:
    facts = driver.facts()
    os.kill(facts["pids"]["worker of 0"], signal.SIGKILL)
    _wait_end_of(facts, "of 0", facts["memory"][:1])
    assert all(is_running(pid) for name, pid in facts["pids"].items() if name.endswith("of 1"))
    os.kill(driver.process.pid, signal.SIGKILL)
    driver.wait()
    _wait_end_of(facts, "of 1", facts["memory"])


@pytest.mark.parametrize("driver", [pytest.param("1 / 0", id="exception")], indirect=True)
def test_driver_ends_without_close(driver: Driver) -> None:
    facts = driver.facts()
    assert driver.wait() == 1
    _wait_end_of(facts, "", facts["memory"])
