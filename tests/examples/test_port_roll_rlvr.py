"""The port of a ROLL pipeline learns, with the same rewards on every scheduler."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from examples.port_roll_rlvr import RLVRPipeline, main
from helmsman import Scheduler, make_scheduler
from helmsman.worker_groups import ResourceManager

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 25
OPTIONS: dict[str, dict[str, Any]] = {"ray": {"address": "local"}}


@pytest.fixture(scope="module", params=["local", "ray"])
def scheduler(request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    name = request.param
    if name == "ray":
        pytest.importorskip("ray", reason="this is the run on Ray")
    with make_scheduler(name, num_gpus=8, num_cpus=4, **OPTIONS.get(name, {})) as made:
        yield made


def rewards(scheduler: Scheduler, seed: int) -> list[float]:
    """Of each step."""
    with (
        ResourceManager(8, 1, scheduler=scheduler) as resource_manager,
        RLVRPipeline(resource_manager, seed) as pipeline,
    ):
        return [pipeline.step(step) for step in range(STEPS)]


@functools.cache
def rewards_inline(seed: int) -> list[float]:
    """Of each step, in this process."""
    with make_scheduler("inline", num_gpus=8) as inline:
        return rewards(inline, seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_port_roll_rlvr_learns(scheduler: Scheduler, seed: int) -> None:
    found = rewards(scheduler, seed)
    assert found == rewards_inline(seed)
    assert found[0] < 0.2 and sum(found[-3:]) / 3 > 0.9, found


def test_port_roll_rlvr_shows_colocation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scheduler", "inline", "--steps", "2", "--seed", "5"]) == 0
    printed = capsys.readouterr().out.splitlines()
    third = next(line for line in printed if line.startswith("3 "))
    assert all(f"{role} since" in third for role in ("actor_train/3", "actor_infer/1", "critic/1"))
    assert [line[:7] for line in printed[-2:]] == ["step  0", "step  1"]
