"""Fixtures: a run with a staged fault, and the files of a run that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.desk import damaged_runs
from tests.desk.staged_runs import Staged, end, run_of, start


@pytest.fixture
def stage() -> Iterator[Callable[[str], Staged]]:
    """Start a run with a fault, and wait until it hangs."""
    processes = []

    def begin(fault: str) -> Staged:
        processes.append(start(fault))
        return run_of(processes[-1])

    yield begin
    for process in processes:
        end(process)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log directory of a run."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    damaged_runs.record_run(folder)
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of records, which is empty."""
    with damaged_runs.own_places(tmp_path_factory.mktemp("places")) as found:
        yield found
