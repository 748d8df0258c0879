"""Runs of several nodes on this machine, of which nothing may be left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controller.bootstrap.nodes import Cable, MakeCable, MakeNodes, Nodes
from tests.controller.bootstrap.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def make_nodes(tmp_path: Path, zygote: Zygote) -> Iterator[MakeNodes]:
    """Make a run; nothing of it may be left in the end."""
    made: list[Nodes] = []

    def make(count: int, **changes: Any) -> Nodes:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Nodes(folder, count, zygote, **changes))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


@pytest.fixture
def make_cable() -> Iterator[MakeCable]:
    made: list[Cable] = []

    def make(port: int) -> Cable:
        made.append(Cable(port))
        return made[-1]

    yield make
    for cable in made:
        cable.close()
