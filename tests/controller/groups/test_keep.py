"""Memory of the workers that keep the results of a group's calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helmsman._wire.segments import spares
from helmsman.api import errors
from helmsman.api.batch import Batch
from helmsman.api.dispatch import Dispatch
from helmsman.api.register import register
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._groups.cluster import Cluster
from helmsman.controller._groups.resource_manager import ResourceManager
from helmsman.controller._scheduler.local import LocalScheduler
from tests.contract.group_workers import Member
from tests.contract.helpers import LIMIT_S, wait_until


class Keeper(Member):
    """A worker that counts its segments."""

    @register(Dispatch.ONE_TO_ALL)
    def num_segments(self) -> int:
        """Count the segments that this process keeps for others."""
        spares.drop()
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum("memfd:helmsman-" in os.readlink(link) for link in links if link.is_symlink())


@pytest.fixture(scope="module")
def group() -> Iterator[Cluster[Keeper]]:
    with (
        LocalScheduler(num_cpus=4, preload=()) as scheduler,
        ResourceManager(0, scheduler=scheduler) as manager,
        Cluster("keepers", Keeper, manager, ClusterConfig(world_size=3, num_cpus=0.5)) as made,  # type: ignore[var-annotated]
    ):
        yield made


def _num_kept(group: Cluster[Keeper]) -> int:
    return sum(group.method(Keeper.num_segments)())


@pytest.mark.parametrize("how", ["a part fails", "a part is late", "the call is cancelled"])
def test_keep_frees_failed_call(group: Cluster[Keeper], tmp_path: Path, how: str) -> None:
    batch = Batch({"x": np.zeros((3, 1 << 16))})
    call = group.method(Member.same_unless).options(
        keep=True, timeout=0.5 if how == "a part is late" else LIMIT_S
    )
    with group.method(Member.same).keep(batch):
        assert _num_kept(group) == 3
    release = tmp_path / "release"
    future = call.submit(batch, 0 if how == "a part fails" else -1, 2, str(release))
    if how == "the call is cancelled":
        wait_until(Path(f"{release}.began").exists, "a part has begun")
        future.cancel()
    else:
        assert isinstance(future.exception(LIMIT_S), errors.HelmsmanError)
    release.touch()
    wait_until(lambda: _num_kept(group) == 0, "the workers keep nothing")


def test_release_of_empty_parts(group: Cluster[Keeper]) -> None:
    """A batch without rows may hold large meta."""
    kept = group.method(Member.uneven).keep(Batch({"x": [1, 2]}, {"table": np.zeros(1 << 16)}))
    assert _num_kept(group) == 3
    kept[1:].release()  # type: ignore[attr-defined]
    assert _num_kept(group) == 2 and kept[:1].fetch()["x"] == [1]  # type: ignore[attr-defined]
    kept.release()
    assert _num_kept(group) == 0
