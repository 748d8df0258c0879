"""The web page of a run with a straggler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from helmsman._desk.ui import Server
from tests.desk.staged_runs import Staged


@pytest.fixture
def served(stage: Callable[[str], Staged]) -> Iterator[Server]:
    server = Server(stage("straggler").run_id, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
