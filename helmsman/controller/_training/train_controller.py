"""TrainController: operates all ranks of a training job as one engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from helmsman._base.event_loop import run_async, run_sync
from helmsman.api.engines import LossFn, Sample
from helmsman.api.errors import (
    CheckpointError,
    EngineCallError,
    GroupCallError,
    InvalidSpecError,
    RoleNotFoundError,
    StartError,
)
from helmsman.api.forms import awaitable
from helmsman.api.scheduler import Job, Scheduler, Worker
from helmsman.api.weight_exchange import ReceivesWeights
from helmsman.controller._groups.call_all import is_communication_error
from helmsman.controller._groups.role_controller import (
    DeviceOwner,
    RoleController,
    blocking,
    rank_environment,
)
from helmsman.controller._scheduler.argument_types import require_integer
from helmsman.controller._training.ranks import Ranks
from helmsman.controller._weights.sync import WeightSync
from helmsman.controller._weights.via_device import ByPlacement

logger = logging.getLogger(__name__)


class TrainController(RoleController):
    """One training job: each method calls all ranks and splits batches by token count.

    Ranks are laid out as in torch, model-parallel innermost. Each ``model_parallel_size``
    consecutive ranks have one data-parallel coordinate and one share of the batch, which is sent to
    the first of them, the head. Each operation ``x`` blocks; ``async_x`` takes the same arguments
    and is awaited, from any event loop.

    An operation that fails on any rank raises GroupCallError with the root cause first; for a job
    with one rank, it raises the CallError itself. While the job shares its devices through a
    DeviceHandoff, an operation that runs out of device memory raises DeviceMemoryError.

    Args:
        scheduler: Starts and calls the workers.
        engine: Import path 'package.module.Class', or a class.
        job: Role, replicas (the world size) and resources of each worker. Each spec gets at least
            one port.
        engine_args: Positional arguments of the engine's constructor, the same on every rank.
        engine_kwargs: Keyword arguments of the engine's constructor, the same on every rank.
        engine_name: Name of the engine in each worker; the worker's id when None.
        model_parallel_size: Ranks that hold one copy of the model; must divide the world size.

    Raises:
        JobError: The job is invalid, or an engine of helmsman.engines has no such argument.
        TypeError: The engine is neither a string nor a class.
        ValueError: ``model_parallel_size`` does not divide the world size.
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
        super().__init__(scheduler, engine, job, engine_args, engine_kwargs, engine_name)
        if model_parallel_size < 1 or job.replicas % model_parallel_size:
            valid = [size for size in range(1, job.replicas + 1) if job.replicas % size == 0]
            raise ValueError(
                f"model_parallel_size is {model_parallel_size}, which does not divide the "
                f"{job.replicas} replicas of job "
                f"{job.role!r}; valid sizes: {', '.join(map(str, valid))}"
            )
        tasks = [
            msgspec.structs.replace(spec, port_count=max(1, spec.port_count)) for spec in job.tasks
        ]
        self.job = msgspec.structs.replace(job, tasks=tasks)
        self.model_parallel_size = model_parallel_size
        self.data_parallel_size = job.replicas // model_parallel_size
        self.num_recoveries = 0
        """Number of rebuilds of all ranks that have begun."""
        self.device_owner: DeviceOwner | None = None
        """The DeviceHandoff that decides which side holds the devices, if a rollout shares them."""
        self._ranks = Ranks(self, model_parallel_size, device_owner=lambda: self.device_owner)
        self.weight_source = self._ranks
        self._way = ByPlacement()

    async def async_train_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, float]:
        """Execute one optimizer step over the whole batch.

        Args:
            samples: The batch, in any order; see helmsman.api.engines.Sample.
            loss_fn: A name from docs/training.md, an import path 'package.module.function', or a
                function that can be pickled.
            loss_kwargs: Further arguments of the loss.
            timeout: Limit in seconds; the scheduler's ``timeouts.call_s`` when None.

        Returns:
            The engine's statistics over the global batch.

        Raises:
            ValueError: The batch is malformed. Nothing was sent.
            DevicesNotOwnedError: A DeviceHandoff has not given the devices to the trainer.
            GroupCallError: A rank failed, such as by a setting that the loss does not accept; a
                job with one rank raises its CallError.
        """
        return await run_async(
            self._ranks.step("train_batch", samples, loss_fn, loss_kwargs, timeout)
        )

    train_batch = blocking(async_train_batch)

    async def async_eval_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, float]:
        """Compute the loss over the whole batch, without gradients and without a step.

        Args:
            samples: The batch, in any order; see helmsman.api.engines.Sample.
            loss_fn: A name, an import path or a function; see ``train_batch``.
            loss_kwargs: Further arguments of the loss.
            timeout: Limit in seconds; the scheduler's ``timeouts.call_s`` when None.

        Returns:
            The engine's statistics over the global batch.

        Raises:
            ValueError: The batch is malformed. Nothing was sent.
            DevicesNotOwnedError: A DeviceHandoff has not given the devices to the trainer.
            GroupCallError: A rank failed, such as by a setting that the loss does not accept; a
                job with one rank raises its CallError.
        """
        return await run_async(
            self._ranks.step("eval_batch", samples, loss_fn, loss_kwargs, timeout)
        )

    eval_batch = blocking(async_eval_batch)

    async def async_forward(
        self, samples: Sequence[Sample], timeout: float | None = None, *, base: bool = False
    ) -> list[Any]:
        """Compute the log-probabilities of each sample's tokens.

        Args:
            samples: The batch, in any order; see helmsman.api.engines.Sample.
            timeout: Limit in seconds; the scheduler's ``timeouts.call_s`` when None.
            base: Whether a trainer of adapters computes by its base model, without them.

        Returns:
            One (T,) float32 array per sample, on the host, in the order of ``samples``.

        Raises:
            ValueError: The batch is malformed. Nothing was sent.
            DevicesNotOwnedError: A DeviceHandoff has not given the devices to the trainer.
            GroupCallError: A rank failed; a job with one rank raises its CallError.
        """
        method = "forward_base" if base else "forward"
        return await run_async(self._ranks.forward(method, samples, timeout))

    forward = blocking(async_forward)

    async def async_forward_top(
        self,
        samples: Sequence[Sample],
        num_choices: int,
        num_ids: int | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Find the most probable tokens in place of each token, such as of a teacher.

        Args:
            samples: The batch, in any order; see helmsman.api.engines.Sample.
            num_choices: Number of tokens, k.
            num_ids: Only ids below this are chosen; the others keep their share of the probability.
                None for all ids.
            timeout: Limit in seconds; the scheduler's ``timeouts.call_s`` when None.

        Returns:
            One pair of arrays per sample, on the host, in the order of ``samples``: ids (T, k)
            int32, the most probable one first, and their log-probabilities (T, k) float32. They are
            the columns ``top_ids`` and ``top_logprobs`` of the loss ``distill``.

        Raises:
            ValueError: The batch is malformed. Nothing was sent.
            DevicesNotOwnedError: A DeviceHandoff has not given the devices to the trainer.
            GroupCallError: A rank failed, such as for a model with fewer ids; a job with one rank
                raises its CallError.
        """
        found = self._ranks.forward("forward_top", samples, timeout, num_choices, num_ids)
        return await run_async(found)

    forward_top = blocking(async_forward_top)

    async def async_save(
        self,
        path: str | os.PathLike[str],
        timeout: float | None = None,
        *,
        background: bool = False,
    ) -> None:
        """Write the complete training state to a folder, which appears only when it is complete.

        Args:
            path: The folder, on storage that all ranks share.
            timeout: Limit in seconds; the scheduler's ``timeouts.call_s`` when None.
            background: Return once the state has been copied to the hosts, and write it while
                training continues. ``wait_for_save``, or an earlier call, raises its errors.

        Raises:
            DevicesNotOwnedError: A DeviceHandoff has not given the devices to the trainer.
            GroupCallError: A rank failed; a job with one rank raises its CallError.
        """
        await run_async(
            self._ranks.replicated(
                "save_in_background" if background else "save", os.fspath(path), timeout=timeout
            )
        )

    save = blocking(async_save)

    async def async_wait_for_save(self, timeout: float | None = None) -> None:
        """Wait until background saves are written, for at most ``timeout`` seconds.

        Raises:
            GroupCallError: The write failed on a rank; a job with one rank raises its CallError.
        """
        await run_async(self._ranks.replicated("wait_for_save", timeout=timeout))

    wait_for_save = blocking(async_wait_for_save)

    async def async_export_hf(
        self,
        path: str | os.PathLike[str],
        dtype: str | None = None,
        max_shard_bytes: int = 5 << 30,
        timeout: float | None = None,
    ) -> None:
        """Write weights, configuration and tokenizer as a Hugging Face folder.

        Args:
            path: The folder, which appears only when it is complete.
            dtype: Floating-point type of the written weights, such as 'bfloat16'; None keeps it.
            max_shard_bytes: Largest size of one file.
            timeout: Limit in seconds; the scheduler's ``timeouts.call_s`` when None.

        Raises:
            GroupCallError: A rank failed; a job with one rank raises its CallError.
        """
        await run_async(
            self._ranks.replicated(
                "export_hf", os.fspath(path), dtype, max_shard_bytes, timeout=timeout
            )
        )

    export_hf = blocking(async_export_hf)

    async def async_export_adapter(
        self, path: str | os.PathLike[str], timeout: float | None = None
    ) -> None:
        """Write the adapters as a folder in the form of PEFT.

        Args:
            path: The folder, which appears only when it is complete.
            timeout: Limit in seconds; the scheduler's ``timeouts.call_s`` when None.

        Raises:
            GroupCallError: A rank failed, or trains no adapters; a job with one rank raises its
                CallError.
        """
        await run_async(self._ranks.replicated("export_adapter", os.fspath(path), timeout=timeout))

    export_adapter = blocking(async_export_adapter)

    async def async_sleep(self, timeout: float | None = None) -> None:
        """Move the state of all ranks to host memory, to free their devices. Idempotent.

        Weights can still be pushed to a rollout. Training and checkpoints are refused until
        ``wake``.
        """
        await run_async(self._ranks.replicated("sleep", timeout=timeout))

    sleep = blocking(async_sleep)

    async def async_wake(self, timeout: float | None = None) -> None:
        """Move the state of all ranks back to their devices. Idempotent.

        Raises:
            DeviceMemoryError: The trainer belongs to a DeviceHandoff, and a device lacks memory.
                The trainer still sleeps.
        """
        await run_async(self._ranks.replicated("wake", timeout=timeout))

    wake = blocking(async_wake)

    async def async_load(self, path: str | os.PathLike[str], timeout: float | None = None) -> None:
        """Load the training state that ``save`` wrote.

        Args:
            path: The folder that was given to ``save``.
            timeout: Limit in seconds; the scheduler's ``timeouts.call_s`` when None.

        Raises:
            CheckpointError: The engine cannot load the checkpoint.
            DevicesNotOwnedError: A DeviceHandoff has not given the devices to the trainer.
            GroupCallError: A rank failed otherwise; a job with one rank raises its CallError.
        """
        try:
            await run_async(self._ranks.replicated("load", os.fspath(path), timeout=timeout))
        except (EngineCallError, GroupCallError) as error:
            cause = error.first if isinstance(error, GroupCallError) else error
            if not isinstance(cause, EngineCallError) or is_communication_error(cause):
                raise
            raise CheckpointError(
                role=self.role, path=os.fspath(path), reason=cause.remote_message
            ) from error

    load = blocking(async_load)

    async def async_get_version(self) -> int:
        """Return the weight version; raises HelmsmanError if the ranks hold different versions."""
        return await run_async(self.weight_source.version())

    get_version = blocking(async_get_version)

    async def async_set_version(self, version: int) -> None:
        """Set the weight version on all ranks."""
        require_integer("set_version", "version", version)
        await run_async(self.weight_source.set_version(version))

    set_version = blocking(async_set_version)

    async def async_set_lr(self, lr: float) -> None:
        """Set the learning rate on all ranks, from the next step on."""
        await run_async(self._ranks.replicated("set_lr", lr))

    set_lr = blocking(async_set_lr)

    async def async_update_rollout(
        self, rollout: ReceivesWeights, timeout: float | None = None
    ) -> int:
        """Push the weights to every rollout instance, by the default way of a WeightSync.

        Requests in flight continue with the new weights.

        Args:
            rollout: The controller of the rollout role.
            timeout: Limit in seconds; the scheduler's ``timeouts.call_s`` when None.

        Returns:
            The weight version that the instances serve.

        Raises:
            ValueError: The two roles run on different schedulers, or the version is below the last
                one pushed.
            HelmsmanError: The trainer failed, its version changed meanwhile, or the rollout is
                asleep without memory for weights.
            GroupCallError: An update failed on an instance; under supervision, on all instances. A
                role with one instance raises its CallError.
        """
        return (await WeightSync(self, rollout, self._way).async_push(timeout)).version

    update_rollout = blocking(async_update_rollout)

    def recover(
        self, checkpoint: str | os.PathLike[str] | None = None, timeout: float | None = None
    ) -> int:
        """Rebuild all ranks after a loss, and load a checkpoint.

        All processes of the role end before any is started, since the surviving ranks wait in
        collectives for the lost ones. They restart at their places. If a node has left or a place
        is not available, they restart wherever the job fits. Other roles are not touched. A failed
        recovery may be repeated.

        Args:
            checkpoint: Folder that ``save`` wrote; None for the weights with which the engines are
                built.
            timeout: Limit in seconds for loading; the scheduler's ``timeouts.call_s`` when None.

        Returns:
            The weight version. It is above all versions reported so far (``get_version``,
            ``update_rollout``), since those belong to other weights.

        Raises:
            StartError: The workers cannot be started.
            RendezvousError: The ranks cannot connect to rank 0.
            CheckpointError: The engine cannot load the checkpoint.
            InvalidSpecError: Other roles share the workers; see Scheduler.restart_workers.
            RequestsInFlightError: In a DeviceHandoff, the rollout's requests did not end in time.
            GroupCallError: A rank failed otherwise; a job with one rank raises its CallError.
        """
        self._check_started()
        self.num_recoveries += 1
        self.weight_source.group_id = ""
        if self.device_owner is not None:
            self.device_owner.make_room()
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

    async_recover = awaitable(recover)

    async def async_raise_version(self) -> int:
        """After weights were restored: raise their version above all versions reported so far.

        Returns:
            The weight version; unchanged if it was above them already.
        """
        return await run_async(self.weight_source.raise_version())

    raise_version = blocking(async_raise_version)

    def _restart(self) -> None:
        """Restart all ranks at their places if these are available, else elsewhere."""
        try:
            places = {worker.node_id for worker in self.scheduler.get_workers(self.role, timeout=0)}
        except RoleNotFoundError:  # an earlier attempt found no place
            self.scheduler.create_workers(self.job)
            return
        gone = places - {node.node_id for node in self.scheduler.nodes()}
        if gone:
            logger.warning(
                "role %s is placed again: %d of its nodes have left (%s)",
                self.role,
                len(gone),
                ", ".join(gone),
            )
            self.scheduler.restart_workers(self.role, elsewhere=True)
            return
        try:
            self.scheduler.restart_workers(self.role)
        except StartError as error:
            logger.warning(
                "role %s is placed again: it could not be restarted on the same devices: %s",
                self.role,
                error,
            )
            try:
                self.scheduler.restart_workers(self.role, elsewhere=True)
            except InvalidSpecError:  # other roles share its workers
                raise error from None

    def _after_death(self) -> str:
        return (
            "RecoverableTraining starts all ranks again and continues from the last checkpoint, "
            "and recover() does so by hand."
        )

    async def _make_ready(self, workers: Sequence[Worker], ranks: Sequence[int]) -> None:
        master = self._environment(workers)[workers[0].id]
        await self.scheduler.probe_rendezvous(
            self.role, master["MASTER_ADDR"], int(master["MASTER_PORT"])
        )
        await super()._make_ready(workers, ranks)

    def _environment(self, workers: Sequence[Worker]) -> Mapping[str, Mapping[str, str]]:
        return rank_environment(self.role, workers)
