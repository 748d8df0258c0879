"""Ranks: calls to all ranks of a training job together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helmsman.api.engines import LossFn, Sample, SampleShare
from helmsman.api.errors import EngineCallError, GroupCallError, HelmsmanError
from helmsman.api.scheduler import Call, Scheduler, Worker
from helmsman.controller._roles.call_all import call_all
from helmsman.controller._roles.role_controller import RoleController, Turn
from helmsman.controller._training.batch_split import split_samples
from helmsman.controller._validation.argument_names import require_loss_settings

_REPLICATED = {"broadcast": False}
"""Every rank is given the arguments itself: they are small, and no rank waits for another to read them."""
_NEEDS_DEVICES = frozenset({"train_batch", "eval_batch", "forward", "save", "save_in_background", "load"})
"""Methods that a rank refuses while it sleeps."""
_FROM_HEAD = {"broadcast": True}
"""The head of each model-parallel group is given the arguments, and the others get them from it."""


class Ranks:
    """The ranks of a job, as one engine. Coroutines run on Helmsman's event loop; errors are those of call_all.

    Args:
        controller: whose workers these are.
        model_parallel_size: neighbours that share one share of a batch.
        has_our_engine: whether all settings of a loss are known; another engine may read settings itself.
        turn: returns whose devices these are, where a rollout takes turns with the job.
    """

    def __init__(
        self,
        controller: RoleController,
        model_parallel_size: int,
        *,
        has_our_engine: bool,
        turn: Callable[[], Turn | None],
    ) -> None:
        self._controller, self._size, self._has_our_engine, self._turn = controller, model_parallel_size, has_our_engine, turn
        self.scheduler: Scheduler = controller.scheduler
        self.role = controller.role

    @property
    def workers(self) -> tuple[Worker, ...]:
        """In rank order. Raises: HelmsmanError unless the controller is started."""
        return self._controller.workers

    async def call(self, method: str, calls: Mapping[str, Call], timeout: float | None = None) -> list[Any]:
        """Call ranks; see call_all. Raises also: DevicesNotOwnedError, DeviceMemoryError."""
        if (turn := self._turn()) is not None and method in _NEEDS_DEVICES:
            turn.require(self.role, method)
        name = self._controller.engine_name
        try:
            return await call_all(self.scheduler, self.role, method, calls, engine_name=name, timeout=timeout)
        except (EngineCallError, GroupCallError) as error:
            if turn is not None:
                await turn.explain(error)
            raise

    async def replicated(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call every rank with the same arguments; returns their results in rank order."""
        meta = _REPLICATED if self._size > 1 else None
        return await self.call(method, {worker.id: Call(args, rpc_meta=meta) for worker in self.workers}, timeout)

    async def on_root(self, method: str, *args: Any, timeout: float | None, keep: bool) -> Any:
        """Call every rank, and return what rank 0 made; with ``keep`` its handle."""
        meta: dict[str, Any] = _REPLICATED if self._size > 1 else {}
        calls = {worker.id: Call(args, rpc_meta=meta) for worker in self.workers}
        calls[self.workers[0].id] = Call(args, rpc_meta={**meta, "keep": keep})
        return (await self.call(method, calls, timeout))[0]

    async def step(
        self,
        method: str,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> dict[str, float]:
        """Give each rank its share of a batch for a loss; returns the statistics. See TrainController.train_batch."""
        if isinstance(loss_fn, str) or self._has_our_engine:
            require_loss_settings(loss_fn, loss_kwargs)
        shares = self._split(samples)
        results = await self._call_shares(method, samples, shares, (loss_fn, loss_kwargs), timeout)
        statistics: dict[str, float] = results[0]
        return statistics

    async def forward(self, samples: Sequence[Sample], timeout: float | None) -> list[Any]:
        """See TrainController.forward."""
        shares = self._split(samples)
        results = await self._call_shares("forward", samples, shares, (), timeout)
        ordered: list[Any] = [None] * len(samples)
        for head, share in enumerate(shares):
            returned = results[head * self._size]
            if len(returned) != len(share):
                raise HelmsmanError(
                    f"{self.workers[head * self._size].id}: forward returned {len(returned)} results for the {len(share)} "
                    "samples it was given; the engine's data-parallel layout is not the controller's "
                    f"({len(shares)} data-parallel ranks of {self._size}).",
                    role=self.role,
                )
            for index, result in zip(share, returned, strict=True):
                ordered[index] = result
        return ordered

    def _split(self, samples: Sequence[Sample]) -> list[list[int]]:
        return split_samples(samples, len(self.workers) // self._size)

    async def _call_shares(
        self,
        method: str,
        samples: Sequence[Sample],
        shares: Sequence[Sequence[int]],
        others: tuple[Any, ...],
        timeout: float | None,
    ) -> list[Any]:
        """Call every rank, also those whose share is empty, since a step is a collective of all."""
        calls = {}
        for rank, worker in enumerate(self.workers):
            head, coordinate = divmod(rank, self._size)
            share = SampleShare((samples[index] for index in shares[head]), shares[head])
            args = (share, *others) if coordinate == 0 else ()
            calls[worker.id] = Call(args, rpc_meta=_FROM_HEAD if self._size > 1 else None)
        return await self.call(method, calls, timeout)
