"""The port of a ROLL pipeline learns, with the same rewards on every scheduler."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from examples.port_roll_rlvr import RLVRPipeline, main
from helmsman import make_scheduler
from helmsman.worker_groups import ResourceManager

pytestmark = pytest.mark.slow

STEPS = 25
OPTIONS: dict[str, dict[str, Any]] = {"ray": {"address": "local"}, "local": {}, "inline": {}}


@functools.cache
def expected(seed: int) -> list[float]:
    return rewards("inline", [seed])[0]


def rewards(name: str, seeds: list[int]) -> list[list[float]]:
    """Of each step, for each seed."""
    found = []
    with make_scheduler(name, num_gpus=8, num_cpus=4, **OPTIONS[name]) as scheduler:
        for seed in seeds:
            with (
                ResourceManager(8, 1, scheduler=scheduler) as resource_manager,
                RLVRPipeline(resource_manager, seed) as pipeline,
            ):
                found.append([pipeline.step(step) for step in range(STEPS)])
    return found


@pytest.mark.parametrize("name", ["local", "ray"])
def test_port_roll_rlvr_learns(name: str) -> None:
    if name == "ray":
        pytest.importorskip("ray", reason="this is the run on Ray")
    for seed, found in enumerate(rewards(name, [0, 1, 2])):
        assert found == expected(seed)
        assert found[0] < 0.2 and sum(found[-3:]) / 3 > 0.9, found


def test_port_roll_rlvr_shows_colocation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scheduler", "inline", "--steps", "2", "--seed", "5"]) == 0
    printed = capsys.readouterr().out.splitlines()
    third = next(line for line in printed if line.startswith("3 "))
    assert all(f"{role} since" in third for role in ("actor_train/3", "actor_infer/1", "critic/1"))
    assert [line[:7] for line in printed[-2:]] == ["step  0", "step  1"]
