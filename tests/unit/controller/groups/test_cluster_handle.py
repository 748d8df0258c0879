"""The address at which a Cluster's controller listens for other processes."""

from __future__ import annotations

import pytest

from helmsman.api import errors
from helmsman.controller._groups.cluster_handle import address_for_others


def test_address_for_others() -> None:
    assert address_for_others({"127.0.0.1"}) is None
    assert address_for_others({"127.0.0.1", "203.0.113.9"}) == "127.0.0.1"
    with pytest.raises(errors.HelmsmanError, match=r"203.0.113.8, 203.0.113.9; pass the address"):
        address_for_others({"203.0.113.9", "203.0.113.8"})
