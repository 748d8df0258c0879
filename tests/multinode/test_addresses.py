"""Tests that a scheduler refuses an ambiguous address."""

from __future__ import annotations

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job
from helmsman.controller._scheduler.ray.cluster_state import choose_address
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.multinode.conftest import Nodes


def test_address_of_connected_cluster(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_address(None) is None
    assert choose_address(nodes.address) is None
    with RayScheduler(address=nodes.address) as run:
        assert run.create_workers(Job(role="r")) == ["r/0"]
    monkeypatch.setenv("RAY_ADDRESS", "10.255.0.1:6379")
    assert choose_address(None) is None, "the connected cluster comes first"


@pytest.mark.parametrize("other", ["local", "10.255.0.1:6379"])
def test_address_of_another_cluster(nodes: Nodes, other: str) -> None:
    with pytest.raises(errors.AmbiguousAddressError) as caught:
        RayScheduler(address=other)
    for fact in (nodes.address, other, "ray.shutdown()"):
        assert fact in str(caught.value)


def test_address_auto_without_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    # A machine on which nothing runs
    monkeypatch.setattr(services.psutil, "process_iter", lambda _: iter(()))  # type: ignore[attr-defined]
    with pytest.raises(errors.ClusterNotFoundError, match="no Ray runs on this machine"):
        choose_address("auto")
