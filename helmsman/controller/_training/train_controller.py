"""TrainController: the ranks of a training job, driven from one script as if they were one
engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

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
from helmsman.api.scheduler import Job, ResultHandle, Scheduler, Worker
from helmsman.api.weight_exchange import ReceivesWeights
from helmsman.controller._aio.event_loop import run_async, run_sync
from helmsman.controller._roles.call_all import is_communication_error
from helmsman.controller._roles.role_controller import (
    DeviceOwner,
    RoleController,
    blocking,
    rank_environment,
)
from helmsman.controller._training.ranks import Ranks
from helmsman.controller._validation.argument_types import checked
from helmsman.controller._weight_sync.sync import ViaExport, WeightSync

logger = logging.getLogger(__name__)


class TrainController(RoleController):
    """One training job: every method is one call on all ranks, and batches are cut over the
    data-parallel ranks by token count.

    Ranks are laid out as torch does, model-parallel innermost: ``model_parallel_size`` neighbours
    share one data-parallel coordinate and one share of the batch, which their first rank, the head,
    receives. Errors are those of call_all. Each operation ``x``
    blocks; ``async_x`` is awaited, from any event loop, with the same arguments and result.
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
        """As RoleController; ``job.replicas`` is the world size, and every spec gets a port at
        least.

        Raises: JobError; ValueError when ``model_parallel_size`` does not divide the world size.
        """
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
        """How often a rebuild of all ranks has begun."""
        self.device_owner: DeviceOwner | None = None
        """Whose devices these are, where a rollout takes turns with it."""
        engine_path = engine if isinstance(engine, str) else engine.__module__
        self._ranks = Ranks(
            self,
            model_parallel_size,
            has_our_engine=engine_path.startswith("helmsman."),
            device_owner=lambda: self.device_owner,
        )
        self.weight_source = self._ranks

    @checked
    async def async_train_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step over the whole batch.

        Args:
            samples: the batch, in any order; see helmsman.api.engines.Sample.
            loss_fn: a name of docs/training.md, an import path 'package.module.function', or a
                function that can be pickled.
            loss_kwargs: further arguments of the loss.
            timeout: seconds for all ranks together; the scheduler's ``timeouts.call_s`` when None.
        Returns: the engine's statistics over the global batch.
        Raises: ValueError for a batch that makes no sense, or a setting that the loss is known not
            to take, before anything is sent; else as call_all.
        """
        return await run_async(
            self._ranks.step("train_batch", samples, loss_fn, loss_kwargs, timeout)
        )

    train_batch = blocking(async_train_batch)

    @checked
    async def async_eval_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[str, float]:
        """As train_batch, without gradients and without a step."""
        return await run_async(
            self._ranks.step("eval_batch", samples, loss_fn, loss_kwargs, timeout)
        )

    eval_batch = blocking(async_eval_batch)

    @checked
    async def async_forward(
        self, samples: Sequence[Sample], timeout: float | None = None
    ) -> list[Any]:
        """Log-probabilities of each sample's tokens, (T,) float32 on the host, in the order of
        ``samples``.
        """
        return await run_async(self._ranks.forward(samples, timeout))

    forward = blocking(async_forward)

    @checked
    async def async_save(
        self,
        path: str | os.PathLike[str],
        timeout: float | None = None,
        *,
        background: bool = False,
    ) -> None:
        """Write all that training goes on from below ``path``, which all ranks can reach; it is
        there when it is complete.

        Args:
            background: return once the state has been copied to the hosts; it is written while
                training goes on. What goes wrong then is raised by wait_for_save, or by the next
                call that comes first.
        """
        await run_async(
            self._ranks.replicated(
                "save_in_background" if background else "save", os.fspath(path), timeout=timeout
            )
        )

    save = blocking(async_save)

    @checked
    async def async_wait_for_save(self, timeout: float | None = None) -> None:
        """Wait until what a save in the background began is written. Raises what it met."""
        await run_async(self._ranks.replicated("wait_for_save", timeout=timeout))

    wait_for_save = blocking(async_wait_for_save)

    @checked
    async def async_export_hf(
        self,
        path: str | os.PathLike[str],
        dtype: str | None = None,
        max_shard_bytes: int = 5 << 30,
        timeout: float | None = None,
    ) -> None:
        """Write weights, configuration and tokenizer as a Hugging Face folder, which gets its name
        when it is complete.

        Args:
            dtype: floating-point type of what is written, such as 'bfloat16'; None leaves it as it
                is.
            max_shard_bytes: of one file.
        """
        await run_async(
            self._ranks.replicated(
                "export_hf", os.fspath(path), dtype, max_shard_bytes, timeout=timeout
            )
        )

    export_hf = blocking(async_export_hf)

    @checked
    async def async_sleep(self, timeout: float | None = None) -> None:
        """Give the devices' memory back: the state of all ranks waits on their hosts. Idempotent.
        Weights can still be brought to a rollout; training and checkpoints are refused until
        wake.
        """
        await run_async(self._ranks.replicated("sleep", timeout=timeout))

    sleep = blocking(async_sleep)

    @checked
    async def async_wake(self, timeout: float | None = None) -> None:
        """Take the devices' memory again. Idempotent. Raises: DeviceMemoryError for a trainer that
        is in a DeviceHandoff, when there is not enough; it sleeps on.
        """
        await run_async(self._ranks.replicated("wake", timeout=timeout))

    wake = blocking(async_wake)

    @checked
    async def async_load(self, path: str | os.PathLike[str], timeout: float | None = None) -> None:
        """Read what save wrote. Raises: CheckpointError when the engine cannot; else as
        call_all.
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
        """The weight version, on which all ranks agree."""
        return await run_async(self.weight_source.version())

    get_version = blocking(async_get_version)

    @checked
    async def async_set_version(self, version: int) -> None:
        """Set the weight version on all ranks."""
        await run_async(self.weight_source.set_version(version))

    set_version = blocking(async_set_version)

    @checked
    async def async_set_lr(self, lr: float) -> None:
        """Use another learning rate on all ranks from the next step on."""
        await run_async(self._ranks.replicated("set_lr", lr))

    set_lr = blocking(async_set_lr)

    @checked
    async def async_export_weights(self, timeout: float | None = None) -> ResultHandle:
        """Gather the full parameters on rank 0 and return a handle; they stay there until
        ``scheduler.release(handle)``.
        """
        return await run_async(self.weight_source.gather(timeout))

    export_weights = blocking(async_export_weights)

    @checked
    async def async_update_rollout(
        self, rollout: ReceivesWeights, timeout: float | None = None
    ) -> int:
        """Bring the current weights to every rollout worker, past the controller; returns the
        version they serve.
        """
        return (await WeightSync(self, rollout, ViaExport()).async_push(timeout)).version

    update_rollout = blocking(async_update_rollout)

    @checked
    def recover(
        self, checkpoint: str | os.PathLike[str] | None = None, timeout: float | None = None
    ) -> int:
        """Rebuild all ranks when some were lost, and load a checkpoint; returns the weight version.

        All processes of the role are ended before any is started, since the ranks that live wait in
        collectives for the lost ones. They come back at their places or, where a node is gone or a
        place cannot be had, wherever the job fits. Other roles are not touched. After an error it
        may be tried again.

        The version is above all that were told before (get_version, update_rollout), since what has
        those versions was made by other weights.

        Args:
            checkpoint: what save wrote; None for the weights with which the engines are built.
            timeout: seconds for loading it; the scheduler's ``timeouts.call_s`` when None.
        Raises: as initialize and load; InvalidSpecError where other roles stand on the workers, see
            Scheduler.restart_workers.
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
        """Once weights were restored: set a version above all that were told before, unless they
        have one; returns it.
        """
        return await run_async(self.weight_source.raise_version())

    raise_version = blocking(async_raise_version)

    def _restart(self) -> None:
        """New processes for all ranks: at their places if these are there, else elsewhere."""
        try:
            places = {worker.node_id for worker in self.scheduler.get_workers(self.role, timeout=0)}
        except RoleNotFoundError:  # an earlier attempt has not found a place
            self.scheduler.create_workers(self.job)
            return
        gone = places - {node.node_id for node in self.scheduler.nodes()}
        if gone:
            logger.warning(
                "role %s is placed again: %d of its nodes have gone (%s)",
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
                "role %s is placed again, since it could not be started at its places: %s",
                self.role,
                error,
            )
            try:
                self.scheduler.restart_workers(self.role, elsewhere=True)
            except InvalidSpecError:  # others stand on its workers there
                raise error from None

    def _after_death(self) -> str:
        return (
            "RecoverableTraining starts all ranks again and goes on from the last checkpoint, "
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
