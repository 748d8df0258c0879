"""TrainController: the ranks of a training job, driven from one script as if they were one engine."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from helmsman.api.engines import LossFn, Sample, SampleShare
from helmsman.api.errors import (
    CheckpointError,
    EngineCallError,
    GroupCallError,
    HelmsmanError,
    InvalidSpecError,
    RoleNotFoundError,
    StartError,
)
from helmsman.api.scheduler import Call, Job, ResultHandle, Scheduler, Worker
from helmsman.api.weights import IntoMemory, WeightFormat, WeightTarget
from helmsman.controller._aio.event_loop import run_async, run_sync
from helmsman.controller._roles.call_all import is_communication_error, release
from helmsman.controller._roles.handoff_protocol import Turn
from helmsman.controller._roles.rank_environment import rank_environment
from helmsman.controller._roles.role_controller import RoleController
from helmsman.controller._training.batch_split import split_samples
from helmsman.controller._validation.argument_names import require_loss_settings
from helmsman.controller._validation.argument_types import checked

logger = logging.getLogger(__name__)

_REPLICATED = {"broadcast": False}
"""Every rank is given the arguments itself: they are small, and no rank waits for another to read them."""
_NEEDS_DEVICES = frozenset({"train_batch", "eval_batch", "forward", "save", "save_in_background", "load"})
"""Methods that a rank refuses while it sleeps."""
_FROM_HEAD = {"broadcast": True}
"""The head of each model-parallel group is given the arguments, and the others get them from it."""


@runtime_checkable
class WeightSink(Protocol):
    """Receives the weights of a trainer: a RolloutController."""

    async def aupdate_weights(self, weights: ResultHandle, version: int, timeout: float | None = None) -> int:
        """Load weights into every instance; returns the version that they serve."""

    def keeps(self, weights: ResultHandle) -> bool:
        """Whether the handle must stay valid, for instances that are built later."""


class TrainController(RoleController):
    """One training job: every method is one call on all ranks, and batches are cut over the data-parallel ranks by token count.

    Ranks are laid out as torch does, model-parallel innermost: ``model_parallel_size`` neighbours share one data-parallel
    coordinate and one share of the batch, which their first rank, the head, receives. Errors are those of call_all. Methods
    whose names begin with ``a`` are awaited, from any event loop; the others block.
    """

    _ready_methods = ("create_process_group", "initialize")

    def __init__(
        self,
        scheduler: Scheduler,
        engine: str | type[Any],
        job: Job,
        engine_args: Sequence[Any] = (),
        engine_kwargs: Mapping[str, Any] | None = None,
        engine_name: str | None = None,
        *,
        model_parallel_size: int = 1,
    ) -> None:
        """As RoleController; ``job.replicas`` is the world size, and every spec gets a port at least.

        Raises: JobError; ValueError when ``model_parallel_size`` does not divide the world size.
        """
        super().__init__(scheduler, engine, job, engine_args, engine_kwargs, engine_name)
        if model_parallel_size < 1 or job.replicas % model_parallel_size:
            valid = [size for size in range(1, job.replicas + 1) if job.replicas % size == 0]
            raise ValueError(
                f"model_parallel_size is {model_parallel_size}, which does not divide the {job.replicas} replicas of job "
                f"{job.role!r}; valid sizes: {', '.join(map(str, valid))}"
            )
        tasks = [msgspec.structs.replace(spec, port_count=max(1, spec.port_count)) for spec in job.tasks]
        self.job = msgspec.structs.replace(job, tasks=tasks)
        self.model_parallel_size = model_parallel_size
        self.data_parallel_size = job.replicas // model_parallel_size
        self.num_recoveries = 0
        """How often all ranks were built anew, or are."""
        self.weight_group = ""
        """Id of the group for weights that rank 0 was the last to be asked into, which it has left every other for."""
        self._version_given: int | None = None
        """The highest weight version that was told or set."""
        self.turn: Turn | None = None
        """Whose devices these are, where a rollout takes turns with it."""

    # --- batches ----------------------------------------------------------------------------------------------------

    @checked
    def train_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step over the whole batch.

        Args:
            samples: the batch, in any order; see helmsman.api.engines.Sample.
            loss_fn: a name of docs/training.md, an import path 'package.module.function', or a function that can be pickled.
            loss_kwargs: further arguments of the loss.
            timeout: seconds for all ranks together; the scheduler's ``timeouts.call_s`` when None.
        Returns: the engine's statistics over the global batch.
        Raises: ValueError for a batch that makes no sense, or a setting that the loss is known not to take, before anything is
            sent; else as call_all.
        """
        return run_sync(self._step("train_batch", samples, loss_fn, loss_kwargs, timeout))

    @checked
    async def atrain_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, float]:
        """As train_batch, awaited."""
        return await run_async(self._step("train_batch", samples, loss_fn, loss_kwargs, timeout))

    @checked
    def eval_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, float]:
        """As train_batch, without gradients and without a step."""
        return run_sync(self._step("eval_batch", samples, loss_fn, loss_kwargs, timeout))

    @checked
    def forward(self, samples: Sequence[Sample], timeout: float | None = None) -> list[Any]:
        """Log-probabilities of each sample's tokens, (T,) float32 on the host, in the order of ``samples``."""
        return run_sync(self._forward(samples, timeout))

    @checked
    async def aforward(self, samples: Sequence[Sample], timeout: float | None = None) -> list[Any]:
        """As forward, awaited."""
        return await run_async(self._forward(samples, timeout))

    async def _step(
        self,
        method: str,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> dict[str, float]:
        engine = self._engine if isinstance(self._engine, str) else self._engine.__module__
        if isinstance(loss_fn, str) or engine.startswith("helmsman."):  # another engine may read settings itself
            require_loss_settings(loss_fn, loss_kwargs)
        shares = split_samples(samples, self.data_parallel_size)
        results = await self._call_shares(method, samples, shares, (loss_fn, loss_kwargs), timeout)
        statistics: dict[str, float] = results[0]
        return statistics

    async def _forward(self, samples: Sequence[Sample], timeout: float | None) -> list[Any]:
        shares = split_samples(samples, self.data_parallel_size)
        results = await self._call_shares("forward", samples, shares, (), timeout)
        ordered: list[Any] = [None] * len(samples)
        for head, share in enumerate(shares):
            returned = results[head * self.model_parallel_size]
            if len(returned) != len(share):
                raise HelmsmanError(
                    f"{self.workers[head * self.model_parallel_size].id}: forward returned {len(returned)} results for the "
                    f"{len(share)} samples it was given; the engine's data-parallel layout is not the controller's "
                    f"({self.data_parallel_size} data-parallel ranks of {self.model_parallel_size}).",
                    role=self.role,
                )
            for index, result in zip(share, returned, strict=True):
                ordered[index] = result
        return ordered

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
            head, coordinate = divmod(rank, self.model_parallel_size)
            share = SampleShare((samples[index] for index in shares[head]), shares[head])
            args = (share, *others) if coordinate == 0 else ()
            calls[worker.id] = Call(args, rpc_meta=_FROM_HEAD if self.model_parallel_size > 1 else None)
        return await self._call_workers(method, calls, timeout)

    # --- weights ----------------------------------------------------------------------------------------------------

    @checked
    def save(self, path: str | os.PathLike[str], timeout: float | None = None, *, background: bool = False) -> None:
        """Write all that training goes on from below ``path``, which all ranks can reach; it is there when it is complete.

        Args:
            background: return once the state has been copied to the hosts; it is written while training goes on. What goes
                wrong then is raised by wait_for_save, or by the next call that comes first.
        """
        run_sync(self._replicated("save_in_background" if background else "save", os.fspath(path), timeout=timeout))

    @checked
    def wait_for_save(self, timeout: float | None = None) -> None:
        """Wait until what a save in the background began is written. Raises what it met."""
        run_sync(self._replicated("wait_for_save", timeout=timeout))

    @checked
    def export_hf(
        self,
        path: str | os.PathLike[str],
        dtype: str | None = None,
        max_shard_bytes: int = 5 << 30,
        timeout: float | None = None,
    ) -> None:
        """Write weights, configuration and tokenizer as a Hugging Face folder, which gets its name when it is complete.

        Args:
            dtype: floating-point type of what is written, such as 'bfloat16'; None leaves it as it is.
            max_shard_bytes: of one file.
        """
        run_sync(self._replicated("export_hf", os.fspath(path), dtype, max_shard_bytes, timeout=timeout))

    @checked
    def sleep(self, timeout: float | None = None) -> None:
        """Give the devices' memory back: the state of all ranks waits on their hosts. Idempotent. Weights can still be brought
        to a rollout; training and checkpoints are refused until wake."""
        run_sync(self._replicated("sleep", timeout=timeout))

    @checked
    def wake(self, timeout: float | None = None) -> None:
        """Take the devices' memory again. Idempotent. Raises: DeviceMemoryError for a trainer that takes Turns, when there is
        not enough; it sleeps on."""
        run_sync(self._replicated("wake", timeout=timeout))

    @checked
    def load(self, path: str | os.PathLike[str], timeout: float | None = None) -> None:
        """Read what save wrote. Raises: CheckpointError when the engine cannot; else as call_all."""
        try:
            run_sync(self._replicated("load", os.fspath(path), timeout=timeout))
        except (EngineCallError, GroupCallError) as error:
            cause = error.first if isinstance(error, GroupCallError) else error
            if not isinstance(cause, EngineCallError) or is_communication_error(cause):
                raise
            raise CheckpointError(role=self.role, path=os.fspath(path), reason=cause.remote_message) from error

    def get_version(self) -> int:
        """The weight version, on which all ranks agree."""
        return run_sync(self._get_version())

    @checked
    def set_version(self, version: int) -> None:
        """Set the weight version on all ranks."""
        run_sync(self._set_version(version))

    @checked
    def set_lr(self, lr: float) -> None:
        """Use another learning rate on all ranks from the next step on."""
        run_sync(self._replicated("set_lr", lr))

    @checked
    def export_weights(self, timeout: float | None = None) -> ResultHandle:
        """Gather the full parameters on rank 0 and return a handle; they stay there until ``scheduler.release(handle)``."""
        return run_sync(self._export_weights(timeout))

    @checked
    def update_rollout(self, rollout: WeightSink, timeout: float | None = None) -> int:
        """Bring the current weights to every rollout worker, past the controller; returns the version they serve."""
        return run_sync(self._update_rollout(rollout, timeout))

    @checked
    async def aupdate_rollout(self, rollout: WeightSink, timeout: float | None = None) -> int:
        """As update_rollout, awaited."""
        return await run_async(self._update_rollout(rollout, timeout))

    # --- recovery ---------------------------------------------------------------------------------------------------

    @checked
    def recover(self, checkpoint: str | os.PathLike[str] | None = None, timeout: float | None = None) -> int:
        """Build all ranks anew when some were lost, and load a checkpoint; returns the weight version.

        All processes of the role are ended before any is started, since the ranks that live wait in collectives for the lost
        ones. They come back at their places or, where a node is gone or a place cannot be had, wherever the job fits. Other
        roles are not touched. After an error it may be tried again.

        The version is above all that were told before (get_version, update_rollout), since what has those versions was made by
        other weights.

        Args:
            checkpoint: what save wrote; None for the weights with which the engines are built.
            timeout: seconds for loading it; the scheduler's ``timeouts.call_s`` when None.
        Raises: as initialize and load; InvalidSpecError where other roles stand on the workers, see
            Scheduler.restart_workers.
        """
        self._check_started()
        self.num_recoveries += 1
        if self.turn is not None:
            self.turn.make_room()
        self._restart()
        workers = tuple(self.scheduler.get_workers(self.role, timeout=0))  # they have just answered
        run_sync(self._make_ready(workers, range(len(workers))))
        self._workers = workers
        if self._closed:
            self._delete_workers(None)
        self._check_started()
        if checkpoint is not None:
            self.load(checkpoint, timeout)
        return self.raise_version()

    def raise_version(self) -> int:
        """Once weights were restored: set a version above all that were told before, unless they have one; returns it."""
        return run_sync(self._raise_version())

    def _restart(self) -> None:
        """New processes for all ranks: at their places if these are there, else elsewhere."""
        try:
            places = {worker.node_id for worker in self.scheduler.get_workers(self.role, timeout=0)}
        except RoleNotFoundError:  # an earlier attempt has not found a place
            self.scheduler.create_workers(self.job)
            return
        gone = places - {node.node_id for node in self.scheduler.nodes()}
        if gone:
            logger.warning("role %s is placed anew: %d of its nodes have gone (%s)", self.role, len(gone), ", ".join(gone))
            self.scheduler.restart_workers(self.role, elsewhere=True)
            return
        try:
            self.scheduler.restart_workers(self.role)
        except StartError as error:
            logger.warning("role %s is placed anew, since it could not be started at its places: %s", self.role, error)
            try:
                self.scheduler.restart_workers(self.role, elsewhere=True)
            except InvalidSpecError:  # others stand on its workers there
                raise error from None

    async def _raise_version(self) -> int:
        before = self._version_given
        version = await self._get_version()
        if before is not None and version <= before:
            version = before + 1
            await self._set_version(version)
        return version

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _call_workers(
        self, method: str, calls: Mapping[str, Call], timeout: float | None = None, grace_s: float | None = 2.0
    ) -> list[Any]:
        if self.turn is None:
            return await super()._call_workers(method, calls, timeout, grace_s)
        if method in _NEEDS_DEVICES:
            self.turn.require(self.role, method)
        try:
            return await super()._call_workers(method, calls, timeout, grace_s)
        except (EngineCallError, GroupCallError) as error:
            await self.turn.explain(error)
            raise

    async def _replicated(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        meta = _REPLICATED if self.model_parallel_size > 1 else None
        return await self._call_workers(method, {worker.id: Call(args, rpc_meta=meta) for worker in self.workers}, timeout)

    async def _get_version(self, timeout: float | None = None) -> int:
        versions: list[int] = await self._replicated("get_version", timeout=timeout)
        if len(set(versions)) > 1:
            found = {worker.id: version for worker, version in zip(self.workers, versions, strict=True)}
            raise HelmsmanError(
                f"the ranks of role {self.role!r} hold different weight versions: {found}. Load one checkpoint on all of them.",
                role=self.role,
                versions=found,
            )
        self._given(versions[0])
        return versions[0]

    async def _set_version(self, version: int) -> None:
        await self._replicated("set_version", version)
        self._given(version)

    def _given(self, version: int) -> None:
        self._version_given = version if self._version_given is None else max(version, self._version_given)

    async def _export_weights(self, timeout: float | None) -> ResultHandle:
        handle = await self._collective_on_root("export_weights", timeout=timeout, keep=True)
        if not isinstance(handle, ResultHandle):
            raise HelmsmanError(
                f"{self.workers[0].id}: export_weights returned {type(handle).__name__} on rank 0, not the parameters.",
                role=self.role,
            )
        return handle

    async def _publish(self, target: WeightTarget, form: WeightFormat, timeout: float | None) -> Any:
        """Send the weights to a target; what rank 0 returns, which stays there if it is all of them."""
        keep = isinstance(target, IntoMemory)
        return await self._collective_on_root("publish_weights", target, form, timeout=timeout, keep=keep)

    async def _open_weight_store(self, timeout: float | None) -> int:
        root = self.workers[0]
        (port,) = await self._call_workers("open_weight_store", {root.id: Call((root.ip,))}, timeout)
        return int(port)

    async def _collective_on_root(self, method: str, *args: Any, timeout: float | None, keep: bool) -> Any:
        """Call every rank, and return what rank 0 made."""
        meta: dict[str, Any] = _REPLICATED if self.model_parallel_size > 1 else {}
        calls = {worker.id: Call(args, rpc_meta=meta) for worker in self.workers}
        calls[self.workers[0].id] = Call(args, rpc_meta={**meta, "keep": keep})
        return (await self._call_workers(method, calls, timeout))[0]

    async def _update_rollout(self, rollout: WeightSink, timeout: float | None) -> int:
        deadline = time.monotonic() + (self.scheduler.timeouts.call_s if timeout is None else timeout)
        version = await self._get_version(deadline - time.monotonic())
        handle = await self._export_weights(deadline - time.monotonic())
        try:
            exported = await self._get_version(deadline - time.monotonic())
            if exported != version:
                raise HelmsmanError(
                    f"role {self.role!r} went on to weight version {exported} while version {version} was exported; which of "
                    "them the export has is not known, and no instance was given it. Take no step, and load nothing, until "
                    "update_rollout has returned; then call it again.",
                    role=self.role,
                    versions=(version, exported),
                )
            return await rollout.aupdate_weights(handle, version, deadline - time.monotonic())
        finally:
            if not rollout.keeps(handle):
                await asyncio.to_thread(release, self.scheduler, handle)

    def _after_death(self) -> str:
        return "RecoverableTraining starts all ranks again and goes on from the last checkpoint, and recover() does so by hand."

    async def _make_ready(self, workers: Sequence[Worker], ranks: Sequence[int]) -> None:
        master = self._environment(workers)[workers[0].id]
        await self.scheduler.probe_rendezvous(self.role, master["MASTER_ADDR"], int(master["MASTER_PORT"]))
        await super()._make_ready(workers, ranks)

    def _environment(self, workers: Sequence[Worker]) -> Mapping[str, Mapping[str, str]]:
        return rank_environment(self.role, workers)
