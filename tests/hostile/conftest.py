"""Fixtures: workers and supervisors under attack, and a proxy of the attacker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import make_nodes  # noqa: F401 - fixture
from tests.hostile.proxy import Proxy
from tests.hostile.worker import Worker

MakeWorker = Callable[[str], Worker]


@pytest.fixture
def make_worker(tmp_path: Path) -> Iterator[MakeWorker]:
    """Start a worker that listens with "tls", "plain" or "unix"."""
    started: list[Worker] = []

    def make(mode: str) -> Worker:
        started.append(Worker(tmp_path, mode))
        return started[-1]

    yield make
    for worker in started:
        worker.close()


@pytest.fixture(params=["tls", "plain"])
def worker(request: pytest.FixtureRequest, make_worker: MakeWorker) -> Worker:
    """A worker on a TCP socket."""
    return make_worker(request.param)


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """A relay to a port that the test chooses."""
    made = Proxy()
    yield made
    made.close()
