"""Runs the pipeline of examples/port_roll_rlvr.py."""

from __future__ import annotations

from examples.port_roll_rlvr import RLVRPipeline
from helmsman import Scheduler
from helmsman.worker_groups import ResourceManager

NUM_STEPS = 25


def rewards(scheduler: Scheduler, seed: int) -> list[float]:
    """Train on a scheduler; returns the reward of each step."""
    with (
        ResourceManager(8, 1, scheduler=scheduler) as resource_manager,
        RLVRPipeline(resource_manager, seed) as pipeline,
    ):
        return [pipeline.step(step) for step in range(NUM_STEPS)]
