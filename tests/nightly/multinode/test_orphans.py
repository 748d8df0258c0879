"""Test that the engines' processes end when their driver ends without close."""

from __future__ import annotations

import pytest

from tests.contract.helpers import (
    Driver,
)
from tests.multinode.families import driver, wait_end_of

__all__ = ["driver"]
pytestmark = pytest.mark.usefixtures("left_as_found")


@pytest.mark.parametrize("driver", [pytest.param("1 / 0", id="exception")], indirect=True)
def test_driver_ends_without_close(driver: Driver) -> None:
    facts = driver.facts()
    assert driver.wait() == 1
    wait_end_of(facts, "", facts["memory"])
