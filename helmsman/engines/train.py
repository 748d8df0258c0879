"""Training engine: a Hugging Face causal language model or value model, sharded with FSDP2.

Fully sharded data parallelism: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277. Every rank
holds a shard of each parameter and processes its own share of the batch. Losses are normalised over
the global batch before the backward pass, so results do not depend on the number of ranks or
micro-batches, up to rounding.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from helmsman.api.engines import LossFn, Sample, TrainEngine
from helmsman.api.platforms import current_platform
from helmsman.api.weights import (
    CollectiveTarget,
    DeviceTarget,
    MemoryTarget,
    WeightFormat,
    WeightsInMemory,
    WeightsOnDisk,
    WeightTarget,
)
from helmsman.engines._models.adapter_files import name_in_file, write_adapter
from helmsman.engines._models.checkpoint import Checkpointer
from helmsman.engines._models.checkpoint_files import TrainProgress
from helmsman.engines._models.distributed import (
    abort_process_groups,
    failing_together,
    join_process_group,
    leave_process_group,
    local_device_index,
    named_tensors,
)
from helmsman.engines._models.engine_checks import config_from
from helmsman.engines._train.adapters import Adapters
from helmsman.engines._train.batching import check_samples
from helmsman.engines._train.model_runner import ModelRunner
from helmsman.engines._train.offload import HostMemory
from helmsman.engines._train.optimizer import FusedAdamW, make_optimizer, take_step
from helmsman.engines._train.parallel import ParallelMesh, layout_of, reshard
from helmsman.engines._train.sharded_model import build_sharded_model
from helmsman.engines._weights.checkpoint_names import CheckpointNames
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines._weights.hf_export import MAX_SHARD_BYTES, export_hf
from helmsman.engines._weights.sending import Gather
from helmsman.engines.losses import prepare_loss
from helmsman.engines.train_config import TrainConfig
from helmsman.engines.weight_transfer import publish


class FSDPTrainEngine(TrainEngine):
    """One rank of a training job.

    Args:
        config: The configuration. Alternatively, pass its fields as keyword arguments.
        **fields: Fields of TrainConfig; not allowed together with ``config``.

    Raises:
        ValueError: Both ``config`` and fields are given, a field is unknown, or a value has the
            wrong type (msgspec.ValidationError).
    """

    def __init__(self, config: TrainConfig | None = None, **fields: Any) -> None:
        self.config = config_from(TrainConfig, config, fields)
        self._leave_group: weakref.finalize[[], FSDPTrainEngine] | None = None
        self._mesh: ParallelMesh | None = None
        self._model: nn.Module | None = None
        self._adapters: Adapters | None = None
        self._in_files: CheckpointNames | None = None
        self._abort_reason = ""
        self._optimizer: FusedAdamW | None = None
        self._progress = TrainProgress(version=0, num_steps=0)
        self._memory = HostMemory(self.config.offload)

    def create_process_group(self) -> None:
        """Join the job's process group; without RANK and WORLD_SIZE, create a group of one.

        Raises:
            ConnectionError: Not all ranks joined within ``rendezvous_timeout_s``.
            ValueError: The process has a group of another size than WORLD_SIZE, or the address of
                rank 0 is missing.
        """
        if self._leave_group is not None:
            return
        current_platform.set_device(local_device_index())
        group = join_process_group(
            rendezvous_timeout_s=self.config.rendezvous_timeout_s,
            collective_timeout_s=self.config.collective_timeout_s,
        )
        if group is not None:
            # A worker that is restarted inline drops its engines without destroying them.
            self._leave_group = weakref.finalize(self, leave_process_group, group)
            self._leave_group.atexit = False

    def initialize(self) -> None:
        """Build the model and the optimizer on this rank.

        Each rank reads its shards from the folder's files. A model that is drawn from a
        configuration, or whose files have an unusual form, is built in host memory as a whole by
        every rank, which then keeps its shards.

        Raises:
            RuntimeError: The engine already has a model, or another rank failed.
            ValueError: The model cannot be built, or cannot be divided as configured.
        """
        if self._model is not None:
            raise RuntimeError(
                "initialize() was called on a train engine that has a model; call destroy() "
                "first, or make a new one"
            )
        self._abort_reason = ""
        if not dist.is_initialized():
            self.create_process_group()
        # FSDP uses the current device. The group may exist without create_process_group.
        current_platform.set_device(local_device_index())
        self._device = current_platform.device(local_device_index())
        self._weight_group = WeightGroup(self._device)
        self._checkpointer = Checkpointer(self._device, self.config.collective_timeout_s)
        self._mesh = ParallelMesh(
            layout_of(self.config), current_platform.device_type, self.config.collective_timeout_s
        )
        self._model, traits, self._adapters = build_sharded_model(
            self.config, self._mesh, self._device
        )
        self._runner = ModelRunner(self.config, traits, self._mesh, self._device, self._built_model)
        self._optimizer = None if self.config.frozen else make_optimizer(self._model, self.config)

    def _built_model(self, *, may_sleep: bool = False) -> nn.Module:
        if self._model is None:
            raise RuntimeError(
                "the train engine has no model; call initialize() first, and nothing after "
                "destroy()"
            )
        if self._abort_reason:
            raise RuntimeError(
                f"the process groups of this train engine were aborted: {self._abort_reason}. "
                "Delete its role and create it again"
            )
        if self._memory.is_asleep and not may_sleep:
            raise RuntimeError(
                "the train engine is asleep: its state is on the host; call wake() first"
            )
        return self._model

    def _built_optimizer(self) -> FusedAdamW:
        self._built_model()
        if self.config.frozen:
            raise RuntimeError(
                "this train engine is frozen (TrainConfig.frozen): it takes no steps and has no "
                "optimizer to save or to load. For other weights, build a new engine with their "
                "folder as its model"
            )
        assert self._optimizer is not None
        return self._optimizer

    def train_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step over this rank's share of a batch, which may be empty.

        Args:
            samples: Columns of each sample by name; see ``helmsman.api.engines.Sample``.
            loss_fn: A name in ``helmsman.engines.losses.LOSSES``, an import path, or a function.
            loss_kwargs: Further arguments of the loss.

        Returns:
            The same statistics on every rank. ``loss`` and the loss's own statistics are averaged
            over the tokens of the global batch (over its pairs for a loss that compares pairs).
            ``num_tokens`` and, for paired losses, ``num_pairs`` are their counts. ``grad_norm`` is
            the norm before clipping; ``lr`` is the learning rate of the step.

        Raises:
            ValueError: A sample is malformed, the global batch has no token in a loss mask, or the
                loss needs another head.
            RuntimeError: The engine is frozen, asleep or has no model. Or another rank failed: an
                error of one rank's loss is raised on all ranks, and no step is taken.
            FloatingPointError: The gradient is not finite; weights and optimizer are unchanged.
        """
        model, optimizer = self._built_model().train(), self._built_optimizer()
        optimizer.zero_grad(set_to_none=True)
        stats = self._accumulate(samples, loss_fn, loss_kwargs)
        num_steps = self._progress.num_steps
        grad_norm, lr = take_step(model, optimizer, self.config, self._memory, num_steps)
        self._progress = TrainProgress(version=self._progress.version + 1, num_steps=num_steps + 1)
        return {**stats, "grad_norm": grad_norm, "lr": lr}

    def eval_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Compute the statistics of train_batch without gradients and without a step.

        Args:
            samples: Columns of each sample by name; see ``helmsman.api.engines.Sample``.
            loss_fn: A name in ``helmsman.engines.losses.LOSSES``, an import path, or a function.
            loss_kwargs: Further arguments of the loss.

        Returns:
            The same statistics on every rank: those of train_batch, without ``grad_norm`` and
            ``lr``.

        Raises:
            ValueError: A sample is malformed, the global batch has no token in a loss mask, or the
                loss needs another head.
            RuntimeError: The engine is asleep or has no model, or another rank failed.
        """
        with self._without_training():
            return self._accumulate(samples, loss_fn, loss_kwargs)

    def _accumulate(
        self, samples: Sequence[Sample], loss_fn: LossFn | str, kwargs: Mapping[str, Any] | None
    ) -> dict[str, float]:
        with failing_together("preparing the batch"):
            self._checkpointer.raise_failure()
            loss = prepare_loss(loss_fn, kwargs, samples, self.config.head)
            checked = check_samples(samples, self._runner.vocab_size)
        return self._runner.accumulate(checked, loss)

    def forward(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Compute the log-probabilities or values of each sample's tokens. A collective.

        Args:
            samples: Columns of each sample by name; see ``helmsman.api.engines.Sample``.

        Returns:
            One (T,) float32 tensor on the host per sample, in the order of the samples. Entry 0 of
            log-probabilities is 0.

        Raises:
            ValueError: A sample is malformed, or its model-parallel ranks have different samples.
            RuntimeError: The engine is asleep or has no model, or another rank failed.
        """
        with self._without_training():
            with failing_together("preparing the batch"):
                checked = check_samples(samples, self._runner.vocab_size)
            return self._runner.forward(checked)

    def forward_base(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """Like ``forward``, by the base model without its adapters.

        This is the initial policy, but for a run that starts from an adapter (``LoRA.path``).

        Raises:
            RuntimeError: The engine trains no adapters; and as ``forward``.
        """
        with self._trained_adapters().off():
            return self.forward(samples)

    def forward_top(
        self, samples: Sequence[Sample], num_choices: int, num_ids: int | None = None
    ) -> list[tuple[torch.Tensor, ...]]:
        """Find the most probable tokens in place of each token, such as of a teacher. A collective.

        Args:
            samples: Columns of each sample by name; see ``helmsman.api.engines.Sample``.
            num_choices: Number of tokens, k.
            num_ids: Only ids below this are chosen; the others keep their share of the probability.
                None for all ids.

        Returns:
            One pair per sample, on the host, in the order of the samples: ids (T, k) int32, the
            most probable one first, and their log-probabilities (T, k) float32. Both are 0 in place
            of the first token.

        Raises:
            ValueError: The model has fewer ids or a value head, a sample is malformed, or its
                model-parallel ranks have different samples.
            RuntimeError: The engine is asleep or has no model, or another rank failed.
        """
        with self._without_training():
            with failing_together("preparing the batch"):
                most = min(self._runner.vocab_size, num_ids or self._runner.vocab_size)
                if self.config.head != "lm" or not 1 <= num_choices <= most:
                    raise ValueError(
                        f"num_choices is {num_choices}, and the model has {most} ids and the head "
                        f"{self.config.head!r}; expected 1 to {most}, and the head 'lm'"
                    )
                checked = check_samples(samples, self._runner.vocab_size)
            return self._runner.top_choices(checked, num_choices, most)

    @contextlib.contextmanager
    def _without_training(self) -> Iterator[None]:
        """Run passes without gradients and dropout; parameters are sharded again afterwards."""
        model = self._built_model().eval()
        try:
            with torch.no_grad():
                yield
        finally:
            reshard(model)

    def export_weights(self) -> dict[str, torch.Tensor] | None:
        """Gather the full parameters on rank 0's host. A collective.

        Returns:
            On rank 0, float32 tensors on the host by Hugging Face name, tied ones once; None
            elsewhere.

        Raises:
            RuntimeError: The engine has no model.
        """
        sent = self.publish_weights(MemoryTarget(version=self._progress.version), WeightFormat())
        return dict(sent.tensors) if isinstance(sent, WeightsInMemory) else None

    def open_weight_store(self, address: str) -> int:
        """Listen on rank 0 for the instances of a weight-sync group.

        Args:
            address: IP address of this rank's host that the instances can reach.

        Returns:
            The port.
        """
        return self._weight_group.open_store(address)

    def open_weight_socket(self) -> str:
        """Listen for the processes on this rank's device, for the next publish_weights.

        Returns:
            The address, for a DeviceTarget.
        """
        self._built_model(may_sleep=True)
        return self._weight_group.open_socket()

    async def leave_out_receiver(self, target: CollectiveTarget | DeviceTarget) -> None:
        """Stop waiting in publish_weights for a receiver that no longer takes part."""
        await asyncio.to_thread(self._weight_group.leave_out, target)

    def publish_weights(
        self, target: WeightTarget, form: WeightFormat
    ) -> WeightsInMemory | WeightsOnDisk | int | None:
        """Send the full parameters by Hugging Face name, bucket by bucket. A collective.

        Rank 0 sends, and the other ranks contribute their shards. To a DeviceTarget, each rank
        sends to the processes on its device.

        Args:
            target: Memory, a folder on disk, a weight-sync group or buffers on devices, with the
                version to send.
            form: Dtype, names, bucket size in bytes and checksums of the sent tensors.

        Returns:
            On rank 0 the weights in memory, the folder, or the number of bytes sent; None
            elsewhere.

        Raises:
            ValueError: The engine's version is not the target's, two parameters map to one name, or
                the dtype is unknown.
            RuntimeError: The engine has no model, or another rank failed.
            ConnectionError: The instances did not join the group, or left it.
            OSError: The files cannot be written.
        """
        model = self._built_model(may_sleep=True)
        try:
            if form.adapters:
                adapters = self._trained_adapters()
                own = adapters.select(named_tensors(model), base=False)
                tensors: Mapping[str, torch.Tensor] = {
                    name_in_file(name): each for name, each in own.items()
                }
                gather = adapters.scaled(own, self._memory.gather)
            else:
                tensors, gather = self._whole(model)
                self._in_files = self._in_files or CheckpointNames(model)
            return publish(
                tensors,
                target,
                form,
                version=self._progress.version,
                is_root=dist.get_rank() == 0,
                group=self._weight_group,
                gather=gather,
                in_files=None if form.adapters else self._in_files,
            )
        finally:
            self._weight_group.close_socket()

    def save(self, path: str) -> None:
        """Write a checkpoint to ``path``, all or nothing. A collective.

        Parameters, optimizer state, weight version, step count and random state are saved; every
        rank writes its part. See Checkpointer.save.

        Args:
            path: Folder that all ranks can write to; an existing checkpoint there is replaced.

        Raises:
            OSError: The files cannot be written.
            RuntimeError: The engine is frozen, asleep or has no model, or another rank failed.
        """
        self._save(path, background=False)

    def save_in_background(self, path: str) -> None:
        """Save like save(), but return once the state has been copied to the host. A collective.

        A later failure is raised by the next train_batch, eval_batch, save, load or wait_for_save.

        Args:
            path: Folder that all ranks can write to; an existing checkpoint there is replaced.

        Raises:
            RuntimeError: The engine is frozen, asleep or has no model, or another rank failed.
        """
        self._save(path, background=True)

    def _save(self, path: str, *, background: bool) -> None:
        model, optimizer, source = self._built_model(), self._built_optimizer(), self._source()
        with self._memory.optimizer_present(optimizer):
            self._checkpointer.save(
                os.fspath(path), model, optimizer, self._progress, source, background=background
            )

    def wait_for_save(self) -> None:
        """Wait until the save that save_in_background began is written. A collective.

        Raises:
            Exception: The error with which that save failed.
        """
        self._built_model(may_sleep=True)
        self._checkpointer.wait()

    def load(self, path: str) -> None:
        """Read a checkpoint of save(), written by any number of ranks. A collective.

        The random state is restored only if the number of ranks is the same.

        Args:
            path: Folder of the checkpoint.

        Raises:
            OSError: The files cannot be read.
            RuntimeError: The engine is frozen, asleep or has no model, or another rank failed.
        """
        self._built_optimizer()
        model = self._built_model()
        optimizer = make_optimizer(model, self.config)
        self._progress = self._checkpointer.load(os.fspath(path), model, optimizer)
        optimizer.cast_moments()
        self._optimizer = optimizer
        self._memory.offload_optimizer(optimizer)

    def export_hf(
        self, path: str, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        """Write the weights and the tokenizer as a Hugging Face folder. A collective.

        Args:
            path: Folder to write, all or nothing.
            dtype: Type of the parameters, such as ``bfloat16``; None keeps theirs.
            max_shard_bytes: Largest size of one safetensors file, in bytes.

        Raises:
            ValueError: The dtype is unknown.
            OSError: The files cannot be written.
            RuntimeError: The engine has no model, or another rank failed.
        """
        model, source = self._built_model(may_sleep=True), self._source()
        tensors, gather = self._whole(model)
        export_hf(
            model,
            os.fspath(path),
            tensors=tensors,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            source=source,
            gather=gather,
        )

    def export_adapter(self, path: str) -> None:
        """Write the adapters as a folder that PEFT, vLLM and SGLang read. A collective.

        Args:
            path: Folder to write, all or nothing.

        Raises:
            OSError: The files cannot be written.
            RuntimeError: The engine trains no adapters or has no model, or another rank failed.
        """
        adapters = self._trained_adapters()
        tensors = adapters.select(named_tensors(self._built_model(may_sleep=True)), base=False)
        wholes = self._memory.gather(list(tensors.values()))
        with failing_together(f"exporting to {path}"):
            if dist.get_rank() == 0:
                write_adapter(
                    os.fspath(path),
                    adapters.form,
                    dict(zip(tensors, wholes, strict=True)),
                    base=self._source(),
                )

    def _trained_adapters(self) -> Adapters:
        self._built_model(may_sleep=True)
        if self._adapters is None:
            raise RuntimeError(
                "this train engine has no adapters to send or to write; give TrainConfig.lora, or "
                "leave WeightFormat.adapters False"
            )
        return self._adapters

    def _whole(self, model: nn.Module) -> tuple[Mapping[str, torch.Tensor], Gather]:
        """Return the tensors of the whole model, and a ``gather`` that merges adapters into it."""
        tensors, gather = named_tensors(model), self._memory.gather
        if self._adapters is None:
            return tensors, gather
        return self._adapters.select(tensors, base=True), self._adapters.merged(tensors, gather)

    def _source(self) -> str | None:
        return self.config.model if isinstance(self.config.model, str) else None

    def sleep(self) -> None:
        """Move parameters and optimizer state to the host and release device memory.

        Host memory is pinned where there is a device. Besides the methods that TrainEngine.sleep
        names, export_hf, wait_for_save, set_version and set_lr are allowed until wake().
        """
        model = self._built_model(may_sleep=True)
        self._memory.sleep(model, self._optimizer)

    def wake(self) -> None:
        """Move parameters and optimizer state back to the device.

        Raises:
            torch.OutOfMemoryError: The device has too little free memory; the engine stays asleep.
        """
        self._built_model(may_sleep=True)
        self._memory.wake()

    def get_version(self) -> int:
        """Return the weight version."""
        return self._progress.version

    async def abort_collectives(self, reason: str) -> None:
        """End the collectives that this rank waits in, while another of its methods runs.

        All engines of this process lose their process groups. gloo does not end a wait, so this
        rank's method then continues until its limit; later calls fail at once on the other ranks.

        Args:
            reason: For the errors of later calls, until ``initialize``.
        """
        self._abort_reason = reason
        await asyncio.to_thread(abort_process_groups)

    def set_version(self, version: int) -> None:
        """Set the weight version; the step count is unchanged."""
        self._progress = TrainProgress(version=version, num_steps=self._progress.num_steps)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate from the next step on; it is not part of a checkpoint.

        Raises:
            ValueError: The rate is negative or not finite.
        """
        self.config = msgspec.structs.replace(self.config, lr=lr)

    def destroy(self) -> None:
        """Free the model and leave the process group if this engine joined it. Idempotent."""
        had_model = self._model is not None
        if had_model:
            self._checkpointer.close()
            self._weight_group.close()
            self._memory.clear()
            del self._runner
            # initialize() may build another model, which starts from these counts.
            self._progress = TrainProgress(version=0, num_steps=0)
        self._mesh = self._model = self._optimizer = self._adapters = None
        if had_model:
            current_platform.empty_cache()
        leave, self._leave_group = self._leave_group, None
        if leave is not None:
            leave()

    @property
    def data_parallel_rank(self) -> int:
        """This rank's coordinate along the data-parallel axis."""
        return layout_of(self.config).data_rank

    @property
    def data_parallel_world_size(self) -> int:
        """Number of ranks along the data-parallel axis."""
        return layout_of(self.config).data_size

    @property
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        """Group of the tensor- and context-parallel ranks of one data-parallel coordinate.

        None when this rank is alone in it, and before initialize().
        """
        return None if self._mesh is None else self._mesh.model_group
