"""Engines with the methods that AReaL's controllers call."""

from __future__ import annotations

import asyncio
import datetime
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Trainer:
    """A rank of a gloo group that receives its arguments from the head."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.initialized = False
        self.rank = int(os.environ["RANK"])
        self._pool = ThreadPoolExecutor(1)

    def create_process_group(self, parallel_strategy: str) -> None:
        """Join the group that the environment describes."""
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        self._group = dist.group.WORLD

    @property
    def context_and_model_parallel_group(self) -> Any:
        """The ranks that share a data-parallel coordinate: all."""
        assert self.initialized, "asked for before initialize()"
        return self._group

    def initialize(self, ft_spec: dict[str, int]) -> None:
        """Load nothing."""
        self.initialized = True

    def is_data_parallel_head(self) -> bool:
        """Whether this rank gets the data."""
        return self.rank == 0

    def train_batch(self, batch: Any, *, scale: int = 1) -> Any:
        """Return the arguments of this rank, from the head or its own."""
        return self.rank, batch, scale

    def update_weights(self, meta: str) -> Future[str]:
        """Return the future of another thread."""
        return self._pool.submit(lambda: f"{meta} on {self.rank}")


class Rollout:
    """An inference engine whose results are polled."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> tuple[int, float | None, bool]:
        """Return the arguments."""
        return task_id, timeout, raise_timeout

    async def wait(self) -> None:
        """Never return."""
        await asyncio.Event().wait()

    def coroutine(self, value: int) -> Any:
        """Return a coroutine that returns another, from a method that is not async."""

        async def inner() -> int:
            await asyncio.sleep(0)
            return value + 1

        async def outer() -> Any:
            return inner()

        return outer()

    def failing(self) -> Future[None]:
        """Return a future that raises."""
        future: Future[None] = Future()
        future.set_exception(KeyError("no such sample"))
        return future

    def process(self) -> int:
        """Return the id of the process."""
        return os.getpid()


class Slow:
    """An engine that takes longer than any limit of these tests."""

    def __init__(self) -> None:
        time.sleep(600)
