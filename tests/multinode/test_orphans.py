"""However a controller on someone's cluster ends, its engines' processes exit within 10 s, and the cluster has all back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.helpers import WAIT, WITH_FAMILY, Driver, has_shared_memory, wait_gone, wait_until
from tests.multinode.conftest import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("left_as_found")]


@pytest.fixture(scope="module")
def nodes(start_nodes: Callable[..., Nodes]) -> Nodes:
    """One node beside the head, whose workers are the raylet's own children."""
    return start_nodes({"num_cpus": 4})


@pytest.fixture
def driver(nodes: Nodes, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A script with two families on the cluster; the parameter is how the script goes on."""
    script = WITH_FAMILY.replace("make()", f"make(address={nodes.address!r})") + request.param
    made = Driver(tmp_path, "ray", script)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("driver", "number"),
    [
        pytest.param(WAIT, signal.SIGKILL, id="SIGKILL"),
        pytest.param(WAIT, signal.SIGTERM, id="SIGTERM"),
        pytest.param("1 / 0", None, id="exception"),
        pytest.param("", None, id="end without close"),
        pytest.param("scheduler.close()", None, id="close"),
    ],
    indirect=["driver"],
)
def test_the_driver_ends(driver: Driver, number: int | None) -> None:
    facts = driver.facts()
    if number is not None:
        os.kill(driver.process.pid, number)
    driver.wait()
    wait_gone(facts["pids"])
    wait_until(lambda: not has_shared_memory(facts["memory"]), "the engines' shared memory is removed", limit_s=10.0)


@pytest.mark.parametrize("driver", [WAIT], indirect=True)
def test_a_worker_is_killed(driver: Driver) -> None:
    facts = driver.facts()
    os.kill(facts["pids"]["worker of 0"], signal.SIGKILL)
    wait_gone({name: pid for name, pid in facts["pids"].items() if name.endswith("of 0")})
    wait_until(lambda: not has_shared_memory(facts["memory"][:1]), "the engine's shared memory is removed", limit_s=10.0)
