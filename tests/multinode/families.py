"""A driver whose engines have children and shared memory, on a cluster that outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.helpers import (
    WITH_FAMILY,
    Driver,
    has_shared_memory,
    wait_gone,
    wait_until,
)
from tests.multinode.conftest import Nodes


@pytest.fixture
def driver(nodes: Nodes, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A script with two families on the cluster; the parameter is its last part."""
    script = WITH_FAMILY.replace("make()", f"make(address={nodes.address!r})") + request.param
    made = Driver(tmp_path, "ray", script)
    yield made
    made.close()


def wait_end_of(facts: dict[str, Any], name: str, memory: list[str]) -> None:
    wait_gone({each: pid for each, pid in facts["pids"].items() if each.endswith(name)})
    wait_until(
        lambda: not has_shared_memory(memory), "the engines' shared memory is removed", limit_s=10.0
    )
