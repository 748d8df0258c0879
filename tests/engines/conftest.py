"""What the tests of engines share: processes of ranks, which end with the last of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.ranks import end_ranks


@pytest.fixture(scope="package", autouse=True)
def ranks_end() -> Iterator[None]:
    """Nothing is started before a test asks for it."""
    yield
    end_ranks()
