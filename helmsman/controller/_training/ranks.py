"""The ranks of a training job: batch split, calls to all ranks, and weights."""

from __future__ import annotations

import contextlib
import heapq
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helmsman.api.engines import PER_CHOICE, LossFn, Sample, SampleShare, require_mapping
from helmsman.api.errors import EngineCallError, GroupCallError, HelmsmanError
from helmsman.api.pairs import sample_units
from helmsman.api.scheduler import Call, ResultHandle, Scheduler, Worker
from helmsman.api.weights import (
    CollectiveTarget,
    DeviceTarget,
    MemoryTarget,
    WeightFormat,
    WeightTarget,
)
from helmsman.controller._groups.call_all import call_all
from helmsman.controller._groups.role_controller import DeviceOwner, RoleController

logger = logging.getLogger(__name__)


def split_by_tokens(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split samples into shares with about equal numbers of tokens.

    Samples are assigned longest first, each to the share with the fewest tokens (Graham 1969,
    "Bounds on multiprocessing timing anomalies"). The largest share has at most 4/3 of the optimum,
    and no two shares differ by more than the longest sample. The split is deterministic.

    Args:
        lengths: Tokens of each sample.
        num_parts: Number of shares.

    Returns:
        The sample indices of each share, ascending. Shares are empty if there are fewer samples.

    Raises:
        ValueError: ``num_parts`` is below 1.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; expected 1 or more")
    shares: list[list[int]] = [[] for _ in range(num_parts)]
    # The number of samples breaks ties, so that samples without tokens are distributed too.
    heap = [(0, 0, part) for part in range(num_parts)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        num_tokens, num_samples, part = heap[0]
        shares[part].append(index)
        heapq.heapreplace(heap, (num_tokens + lengths[index], num_samples + 1, part))
    for share in shares:
        share.sort()
    return shares


def split_samples(samples: Sequence[Mapping[str, Any]], num_parts: int) -> list[list[int]]:
    """Split a batch by token count, keeping both samples of a pair (helmsman.api.pairs) together.

    Raises:
        ValueError: The batch or its pairs are malformed.
    """
    lengths = sample_lengths(samples)
    units = sample_units(samples)
    shares = split_by_tokens([sum(lengths[index] for index in unit) for unit in units], num_parts)
    return [sorted(index for number in share for index in units[number]) for share in shares]


def sample_lengths(samples: Sequence[Mapping[str, Any]]) -> list[int]:
    """Validate a batch and return the number of tokens of each sample.

    Raises:
        ValueError: The batch is empty, a sample is not a mapping or lacks flat ``input_ids``, a
            per-token column has another length, or samples have different columns. Names the sample
            and the column.
    """
    if not samples:
        raise ValueError("the batch has no samples; give at least one")
    for index, sample in enumerate(samples):
        require_mapping(index, sample)
    columns = set(samples[0])
    lengths = []
    for index, sample in enumerate(samples):
        if "input_ids" not in sample:
            raise ValueError(f"sample {index} has no column 'input_ids'; it has {sorted(sample)}")
        num_tokens = _num_entries(index, "input_ids", sample["input_ids"])
        if not num_tokens:
            what = "a scalar" if num_tokens is None else "empty"
            raise ValueError(
                f"sample {index}: column 'input_ids' is {what}; expected the token ids of one "
                "sequence"
            )
        if set(sample) != columns:
            column = min(set(sample) ^ columns)
            having, missing = (index, 0) if column in sample else (0, index)
            raise ValueError(
                f"sample {missing} has no column {column!r}, but sample {having} has; give it to "
                "all samples or to none"
            )
        for column, value in sample.items():
            num_entries = _num_entries(index, column, value)
            if num_entries is not None and num_entries != num_tokens:
                raise ValueError(
                    f"sample {index}: column {column!r} has {num_entries} entries, but "
                    f"'input_ids' has {num_tokens}; expected "
                    "one entry per token, or a scalar"
                )
        lengths.append(num_tokens)
    return lengths


def _num_entries(index: int, column: str, value: Any) -> int | None:
    """Return the number of entries of a flat column; None for a scalar."""
    # Detects arrays and tensors without importing their libraries.
    shape = getattr(value, "shape", None)
    if shape is not None:
        if len(shape) > 1 and column not in PER_CHOICE:
            raise ValueError(
                f"sample {index}: column {column!r} has shape {tuple(shape)}; expected one entry "
                "per token, or a scalar"
            )
        return int(shape[0]) if shape else None
    if isinstance(value, (str, bytes)):
        return None
    try:
        return len(value)
    except TypeError:
        return None


_ABORT_LIMIT_S = 20.0
"""Longest wait in seconds for ranks to abort their process groups."""
_REPLICATED = {"broadcast": False}
"""Sends the arguments to every rank: they are small, and no rank waits for another."""
_NEEDS_DEVICES = frozenset(
    {"train_batch", "eval_batch", "forward", "forward_top", "save", "save_in_background", "load"}
)
"""Methods that need the devices; a sleeping rank refuses them."""
_FROM_HEAD = {"broadcast": True}
"""Sends the arguments to the head of each model-parallel group, which broadcasts them."""


class Ranks:
    """The ranks of a job, as one engine and as its WeightSource.

    A failed call raises GroupCallError; with one rank, its CallError.

    Args:
        controller: The controller of the job.
        model_parallel_size: Consecutive ranks that receive the same share of a batch.
        device_owner: Returns the DeviceHandoff of the job's devices; None if they are not shared.
    """

    def __init__(
        self,
        controller: RoleController,
        model_parallel_size: int,
        *,
        device_owner: Callable[[], DeviceOwner | None],
    ) -> None:
        self._controller = controller
        self._size = model_parallel_size
        self._device_owner = device_owner
        self.scheduler: Scheduler = controller.scheduler
        self.role = controller.role
        self.group_id = ""
        self._highest: int | None = None
        """The highest weight version that was reported or set."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self._controller.workers

    async def call(
        self, method: str, calls: Mapping[str, Call], timeout: float | None = None
    ) -> list[Any]:
        """Call ranks with ``call_all``, within the turns of a DeviceHandoff if there is one.

        Raises:
            DevicesNotOwnedError: The method needs the devices, and it is not the trainer's turn.
            DeviceMemoryError: A device that is shared with a rollout lacks memory.
            GroupCallError: A rank failed; a call to one rank raises its CallError.
        """
        if (device_owner := self._device_owner()) is not None and method in _NEEDS_DEVICES:
            device_owner.require(self.role, method)
        name = self._controller.engine_name
        try:
            return await call_all(
                self.scheduler,
                self.role,
                method,
                calls,
                engine_name=name,
                timeout=timeout,
                release_peers=self._abort_collectives,
            )
        except (EngineCallError, GroupCallError) as error:
            if device_owner is not None:
                await device_owner.explain(error)
            raise

    async def _abort_collectives(self) -> None:
        """End the waits of ranks for one that has failed; their engines must be built again."""
        logger.warning(
            "%s: ranks wait in collectives for a rank that has failed. Their process groups are "
            "aborted: to continue, delete the role and create it again",
            self.role,
        )
        reason = "a rank failed while others waited for it"
        # A rank may have died, and an engine that is not ours may lack the method.
        with contextlib.suppress(HelmsmanError):
            await call_all(
                self.scheduler,
                self.role,
                "abort_collectives",
                {worker.id: Call((reason,)) for worker in self.workers},
                engine_name=self._controller.engine_name,
                timeout=_ABORT_LIMIT_S,
                grace_s=None,
            )

    async def replicated(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call every rank with the same arguments and return the results in rank order."""
        meta = _REPLICATED if self._size > 1 else None
        return await self.call(
            method, {worker.id: Call(args, rpc_meta=meta) for worker in self.workers}, timeout
        )

    async def step(
        self,
        method: str,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> dict[str, float]:
        """Call a loss method with each rank's share; see TrainController.train_batch."""
        shares = self._split(samples)
        results = await self._call_shares(method, samples, shares, (loss_fn, loss_kwargs), timeout)
        statistics: dict[str, float] = results[0]
        return statistics

    async def forward(
        self, method: str, samples: Sequence[Sample], timeout: float | None, *others: Any
    ) -> list[Any]:
        """Call a method that returns a result per sample; returns them in the batch's order."""
        shares = self._split(samples)
        results = await self._call_shares(method, samples, shares, others, timeout)
        ordered: list[Any] = [None] * len(samples)
        for head, share in enumerate(shares):
            returned = results[head * self._size]
            if len(returned) != len(share):
                raise HelmsmanError(
                    f"{self.workers[head * self._size].id}: {method} returned {len(returned)} "
                    f"results for {len(share)} "
                    "samples; the engine's data-parallel layout differs from the controller's "
                    f"({len(shares)} data-parallel ranks of {self._size} workers each). Give both "
                    "the same parallel sizes.",
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
        """Call every rank, even with an empty share, since a step is a collective of all ranks."""
        calls = {}
        for rank, worker in enumerate(self.workers):
            head, coordinate = divmod(rank, self._size)
            share = SampleShare((samples[index] for index in shares[head]), shares[head])
            args = (share, *others) if coordinate == 0 else ()
            calls[worker.id] = Call(args, rpc_meta=_FROM_HEAD if self._size > 1 else None)
        return await self.call(method, calls, timeout)

    # --- weights ----------------------------------------------------------------------------------

    async def version(self, timeout: float | None = None) -> int:
        versions: list[int] = await self.replicated("get_version", timeout=timeout)
        if len(set(versions)) > 1:
            found = {
                worker.id: version for worker, version in zip(self.workers, versions, strict=True)
            }
            raise HelmsmanError(
                f"the ranks of role {self.role!r} hold different weight versions: {found}. Load "
                "one checkpoint on all of them.",
                role=self.role,
                versions=found,
            )
        self._note(versions[0])
        return versions[0]

    async def set_version(self, version: int) -> None:
        await self.replicated("set_version", version)
        self._note(version)

    async def raise_version(self) -> int:
        """Raise the version above all versions reported or set before, and return it."""
        before = self._highest
        version = await self.version()
        if before is not None and version <= before:
            version = before + 1
            await self.set_version(version)
        return version

    def _note(self, version: int) -> None:
        self._highest = version if self._highest is None else max(version, self._highest)

    async def publish(self, target: WeightTarget, form: WeightFormat, timeout: float | None) -> Any:
        keep = isinstance(target, MemoryTarget)
        meta: dict[str, Any] = _REPLICATED if self._size > 1 else {}
        calls = {worker.id: Call((target, form), rpc_meta=meta) for worker in self.workers}
        root = self.workers[0].id
        calls[root] = Call((target, form), rpc_meta={**meta, "keep": keep})
        sent = (await self.call("publish_weights", calls, timeout))[0]
        if keep and not isinstance(sent, ResultHandle):
            raise HelmsmanError(
                f"{root}: publish_weights returned {type(sent).__name__} on rank 0; expected its "
                "weights.",
                role=self.role,
            )
        return sent

    async def open_store(self, timeout: float | None) -> int:
        root = self.workers[0]
        (port,) = await self.call("open_weight_store", {root.id: Call((root.ip,))}, timeout)
        return int(port)

    async def open_sockets(self, timeout: float | None) -> list[str]:
        addresses: list[str] = await self.replicated("open_weight_socket", timeout=timeout)
        return addresses

    async def leave_out(self, target: CollectiveTarget | DeviceTarget) -> None:
        await self.replicated("leave_out_receiver", target)
