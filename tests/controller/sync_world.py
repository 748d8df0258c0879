"""A trainer and a rollout on real engines, for tests of weight syncs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from helmsman import (
    Job,
    RolloutController,
    Scheduler,
    SchedulingSpec,
    SchedulingStrategy,
    SupervisionPolicy,
    TrainController,
)
from helmsman.api.workers import WorkerState
from helmsman.controller._rollout.health import Health
from helmsman.controller._weights.sync import WeightSync
from helmsman.controller._weights.transport import ViaDisk, ViaMemory, WeightTransport
from helmsman.controller._weights.via_collective import ViaCollective
from tests.engines.small_models import QWEN2, random_tokens

ENGINES = "tests.controller.sync_engines"
SPEC = SchedulingSpec(cpu=0.1)
SUPERVISED = SupervisionPolicy(probe_every_s=0.2, suspect_s=2.0, dead_s=30.0, max_restarts=0)
PROMPT = random_tokens(6, seed=1)


class World:
    """A trainer and a rollout that are ready.

    Args:
        scheduler: Starts the workers.
        num_ranks: Number of trainer ranks.
        num_instances: Number of rollout instances.
        name: Suffix of both roles.
        **options: ``spec``, ``beside`` (instances are siblings of the ranks), ``model``,
            ``trainer`` (a class of sync_engines), and options of RolloutController.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        num_ranks: int,
        num_instances: int,
        name: str = "",
        **options: Any,
    ) -> None:
        self.scheduler = scheduler
        spec = options.pop("spec", SPEC)
        strategy = (
            SchedulingStrategy(type="colocation", target=f"train{name}", fork=True)
            if options.pop("beside", False)
            else SchedulingStrategy()
        )
        model = {"model": options.pop("model", QWEN2), "seed": 3}
        self.trainer = TrainController(
            scheduler,
            f"{ENGINES}.{options.pop('trainer', 'Trainer')}",
            Job(role=f"train{name}", replicas=num_ranks, tasks=[spec]),
            engine_kwargs={**model, "lr": 1e-2},
        )
        self.rollout = RolloutController(
            scheduler,
            f"{ENGINES}.Rollout",
            Job(
                role=f"rollout{name}",
                replicas=num_instances,
                tasks=[spec],
                scheduling_strategy=strategy,
            ),
            engine_kwargs={**model, "max_concurrency": 8, "max_model_len": 2048},
            **options,
        )
        self.trainer.initialize()
        self.rollout.initialize()
        self.ids = tuple(worker.id for worker in self.rollout.workers)

    def step(self) -> int:
        """Change the trainer's weights and return their version."""
        self.trainer.train_batch(
            [{"input_ids": random_tokens(12, seed=5)} for _ in range(4)], "sft"
        )
        return self.trainer.get_version()

    def differing(self, ids: Sequence[str] | None = None) -> dict[str, list[str]]:
        """Return, by instance, the names of parameters that differ from the trainer's."""
        expected = self.expected()
        served = {id_: self.scheduler.call_engine(id_, "parameters") for id_ in ids or self.ids}
        return {
            id_: [
                name for name, tensor in expected.items() if not torch.equal(tensor, tensors[name])
            ]
            for id_, tensors in served.items()
        }

    def expected(self) -> dict[str, torch.Tensor]:
        """Return the trainer's parameters."""

        async def ask() -> list[Any]:
            calls = (
                self.scheduler.async_call_engine(worker.id, "parameters")
                for worker in self.trainer.workers
            )
            return list(await asyncio.gather(*calls))

        found: dict[str, torch.Tensor] = asyncio.run(ask())[0]
        return found

    def updates(self) -> list[int]:
        """Return the number of updates that each instance has received."""
        return [self.scheduler.call_engine(id_, "updates") for id_ in self.ids]

    def health(self) -> list[Health]:
        return [load.state for load in self.rollout.stats().instances.values()]

    def sync(self, way: WeightTransport | None = None, **options: Any) -> WeightSync:
        """Return a sync from the trainer to the rollout."""
        return WeightSync(self.trainer, self.rollout, way, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self.rollout.close()
        self.trainer.close()

    def pid(self, worker_id: str) -> int:
        return next(
            int(status.pid)  # type: ignore[arg-type]
            for status in self.scheduler.status()
            if status.worker_id == worker_id
        )

    def num_segments(self) -> int:
        """Return the number of memory segments that the trainer's rank 0 has open."""
        folder = Path(f"/proc/{self.pid(self.trainer.workers[0].id)}/fd")
        return sum("memfd" in os.readlink(link) for link in folder.iterdir())


class SharedWorld:
    """A world that the tests of a module share; it is replaced when one of its workers dies."""

    def __init__(self, make: Callable[[], World]) -> None:
        self._make = make
        self._world: World | None = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[World]:
        """Lend the world to one test, and print the logs of workers that die in it."""
        world = self._world = self._world or self._make()
        try:
            yield world
        finally:
            ids = {each.id for each in (*world.trainer.workers, *world.rollout.workers)}
            failed = [
                each
                for each in world.scheduler.status()
                if each.worker_id in ids and each.state is WorkerState.FAILED
            ]
            for each in failed:
                print(f"log of {each.worker_id}:\n{Path(each.log_path).read_text()}")
            if failed:
                self.close()

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None


def way_of(name: str, folder: Path) -> ViaMemory | ViaDisk | ViaCollective:
    """Return the transport of this name."""
    return (
        {"memory": ViaMemory, "collective": ViaCollective}[name]()
        if name != "disk"
        else ViaDisk(str(folder / "weights"))
    )


@contextlib.contextmanager
def resumed(pid: int) -> Iterator[None]:
    """Resume a stopped process at the end of the block."""
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
