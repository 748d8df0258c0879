"""Tests that Ray workers on an embedded cluster are forks, which equal other Ray workers."""

from __future__ import annotations

from typing import Any

import psutil

from tests.rpc_server.ray_forks.cluster import (
    PLAIN,
    SHELL_VARIABLES,
    Actor,
    cluster,
    forkserver,
    ray,
)

__all__ = ["cluster", "forkserver"]


def test_fork_equals_plain_worker(cluster: Any, forkserver: psutil.Process) -> None:
    forked, plain = Actor.remote(), Actor.options(**PLAIN).remote()  # type: ignore[attr-defined]
    of_fork, of_plain = ray.get([forked.facts.remote(), plain.facts.remote()])
    assert of_fork.pop("parent") == forkserver.pid
    assert psutil.Process(of_plain.pop("parent")).name() == "raylet"
    for name in ("TORCH_OF_ITS_OWN", "RAY_JOB_ID", *SHELL_VARIABLES):  # some start for any job
        of_fork["variables"].pop(name, None)
        of_plain["variables"].pop(name, None)
    assert of_fork == of_plain
