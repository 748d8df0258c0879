"""Fixture: a run with a staged fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.controller.operator.staged_runs import Staged, end, run_of, start


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
