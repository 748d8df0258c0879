"""What the tests of engines share: processes of ranks, which end with the last of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engines.ranks import end_ranks


@pytest.fixture(scope="package", autouse=True)
def ranks_end() -> Iterator[None]:
    """Nothing is started before a test asks for it."""
    yield
    end_ranks()


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing by more, and on busy cores threads that wait for each other take several times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
