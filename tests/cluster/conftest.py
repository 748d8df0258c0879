"""Fixture: runs of several nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import MakeNodes, Nodes


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[MakeNodes]:
    """Make a run, and check at the end that nothing of it is left."""
    made: list[Nodes] = []

    def make(count: int, **changes: Any) -> Nodes:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Nodes(folder, count, **changes))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()
