"""Test that a broadcast that cannot end times out or is aborted, and never ends the process.

NCCL needs devices, so a fake replaces its class, whose broadcasts end only when they are aborted.
"""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helmsman.engines._weights.broadcast_group import BroadcastGroup

VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Backend:
    """A backend whose broadcasts end only by an abort."""

    Options = types.SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, world_size: int, options: Any) -> None:
        self.options, self.handling = options, os.environ.get(VARIABLE)
        self.has_begun, self.has_ended = threading.Event(), threading.Event()
        made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Any:
        self.has_begun.set()
        return types.SimpleNamespace(is_completed=self.has_ended.is_set, wait=self.has_ended.wait)

    def abort(self) -> None:
        self.has_ended.set()


made: list[Backend] = []


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[], BroadcastGroup]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    made.clear()
    return lambda: BroadcastGroup("nccl", dist.HashStore(), 0, 2, 120.0)


@pytest.mark.parametrize("before", [None, "3"])
def test_broadcast_group_watchdog_only_reports(
    before: str | None, make: Callable[[], BroadcastGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's defaults, NCCL's watchdog ends the trainer when an instance has died."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    make()
    assert made[0].handling == "0"
    assert os.environ.get(VARIABLE) == before
    assert made[0].options._timeout.total_seconds() > 120.0


def test_broadcast_group_silent_member(
    make: Callable[[], BroadcastGroup],
) -> None:
    group = make()
    with pytest.raises(RuntimeError, match=r"a broadcast did not end within 0\.05 s"):
        group.broadcast(torch.zeros(1), 0.05)


def test_broadcast_group_abort_from_another_thread(
    make: Callable[[], BroadcastGroup],
) -> None:
    group = make()

    def abort() -> None:
        made[0].has_begun.wait(10)
        group.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(RuntimeError, match="the broadcast was aborted"):
        group.broadcast(torch.zeros(1), 60.0)
    thread.join()


def test_broadcast_group_abort_on_npus(make: Callable[[], BroadcastGroup]) -> None:
    """ProcessGroupHCCL has an abort of another name; the inherited one does nothing."""
    group = make()
    reasons: list[str] = []
    made[0].abort_hccl_comm = reasons.append  # type: ignore[attr-defined]
    group.abort()
    assert reasons == ["left the group"]
    assert not made[0].has_ended.is_set()


def test_broadcast_group_unknown_backend() -> None:
    with pytest.raises(ValueError, match="by 'mpi'; expected gloo, nccl or hccl"):
        BroadcastGroup("mpi", dist.HashStore(), 0, 1, 1.0)
