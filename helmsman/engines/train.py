"""Training engine: a Hugging Face causal language model or value model, sharded with FSDP2.

Fully sharded data parallelism: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277. Every rank
holds a shard of each parameter and processes its own share of the batch. Losses are normalised over
the global batch before the backward pass, so results do not depend on the number of ranks or
micro-batches, up to rounding.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

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
from helmsman.engines._models.checkpoint import Checkpointer
from helmsman.engines._models.checkpoint_files import Progress
from helmsman.engines._models.distributed import (
    abort_process_groups,
    environment_int,
    failing_together,
    gather_objects,
    join_process_group,
    leave_process_group,
    local_device_index,
    named_tensors,
)
from helmsman.engines._models.model import build_model, checkpoint_layers, resolve_dtype
from helmsman.engines._train.attention import (
    RowShape,
    check_heads,
    compile_layers,
    gather_tokens,
    use_row_attention,
    why_not_rows,
)
from helmsman.engines._train.batching import (
    Batching,
    Columns,
    MicroBatch,
    check_samples,
    empty_micro_batch,
    fingerprint,
    group_samples,
    make_micro_batch,
)
from helmsman.engines._train.offload import HostMemory, offload_policy, place
from helmsman.engines._train.optimizer import FusedAdamW
from helmsman.engines._train.output_layer import return_statistics
from helmsman.engines._train.parallel import (
    Layout,
    ParallelMesh,
    begin_backward,
    clip_gradients,
    reshard,
    shard_model,
    whole_pass,
)
from helmsman.engines._train.parallel_plan import TensorPlan
from helmsman.engines._weights.checkpoint_names import CheckpointNames
from helmsman.engines._weights.deferred import DeferredModel, defer_model
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines._weights.hf_export import MAX_SHARD_BYTES, export_hf
from helmsman.engines.losses import LossCall, prepare_loss
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
        if config is not None and fields:
            raise ValueError(
                f"give either a TrainConfig or its fields, not both (fields: {', '.join(fields)})"
            )
        self.config = config if config is not None else msgspec.convert(fields, TrainConfig)
        self._owns_group = False
        self._mesh: ParallelMesh | None = None
        self._model: nn.Module | None = None
        self._in_files: CheckpointNames | None = None
        self._abort_reason = ""
        self._optimizer: FusedAdamW | None = None
        self._progress = Progress(version=0, num_steps=0)
        self._memory = HostMemory(self.config.offload)

    def create_process_group(self) -> None:
        """Join the job's process group; without RANK and WORLD_SIZE, create a group of one.

        Raises:
            ConnectionError: Not all ranks joined within ``rendezvous_timeout_s``.
        """
        if self._owns_group:
            return
        current_platform.set_device(local_device_index())
        self._owns_group = join_process_group(
            rendezvous_timeout_s=self.config.rendezvous_timeout_s,
            collective_timeout_s=self.config.collective_timeout_s,
        )

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
            self._layout(), current_platform.device_type, self.config.collective_timeout_s
        )
        with failing_together("building the model"):
            dtype = (
                resolve_dtype(self.config.compute_dtype) if self.config.frozen else torch.float32
            )
            model, deferred = self._build_model(dtype)
            model.requires_grad_(not self.config.frozen)
            plan = self._prepare(model)
        policy = MixedPrecisionPolicy(
            param_dtype=resolve_dtype(self.config.compute_dtype),
            reduce_dtype=resolve_dtype(self.config.reduce_dtype),
        )
        shard_model(
            model,
            self._mesh,
            plan,
            policy,
            reshard_after_forward=self.config.reshard_after_forward,
            offload_policy=offload_policy(self.config.offload),
            num_prefetched_layers=self.config.num_prefetched_layers,
        )
        if deferred is not None:
            with failing_together("reading the model's weights"):
                on_host = self.config.offload == "all"
                deferred.read(torch.device("cpu") if on_host else self._device)
        self._model = place(model, self._device, self.config.offload)
        self._optimizer = None if self.config.frozen else self._make_optimizer()

    def _build_model(self, dtype: torch.dtype) -> tuple[nn.Module, DeferredModel | None]:
        """Build the model, without its weights if they can be read after it has been sharded."""
        given, seed, head = self.config.model, self.config.seed, self.config.head
        deferred = None
        if isinstance(given, str) and os.path.isdir(given):
            deferred = defer_model(given, seed=seed, dtype=dtype, head=head)
        if deferred is not None:
            return deferred.model, deferred
        return build_model(given, seed=seed, dtype=dtype, head=head), None

    def _prepare(self, model: nn.Module) -> TensorPlan | None:
        """Validate the parallel layout against the model, and modify the model before sharding."""
        config: Any = model.config
        tensor_size, context_size = (
            self.config.tensor_parallel_size,
            self.config.context_parallel_size,
        )
        plan = TensorPlan(model, tensor_size) if tensor_size > 1 else None
        packing = not why_not_rows(model) if self.config.packing is None else self.config.packing
        if context_size > 1:
            use_row_attention(model, f"context_parallel_size {context_size}")
            check_heads(config.get_text_config(), tensor_size, context_size)
        elif packing:
            use_row_attention(model, "packing")
        if self.config.compile_layers:
            compile_layers(model)  # checkpoints, and later FSDP, work on the compiled layers
        if self.config.gradient_checkpointing:
            checkpoint_layers(model)
        if self.config.head == "lm":
            return_statistics(model)
        self._uses_row_attention = packing or context_size > 1
        self._has_sharded_logits = plan is not None and plan.has_sharded_logits
        self._batching = Batching(
            max_tokens=self.config.max_tokens_per_micro_batch,
            vocab_size=int(config.get_text_config().vocab_size),
            packing=packing,
            multiple=context_size,
        )
        return plan

    def _built_mesh(self) -> ParallelMesh:
        assert self._mesh is not None
        return self._mesh

    def _make_optimizer(self) -> FusedAdamW:
        return FusedAdamW(
            self._built_model().parameters(),
            lr=self.config.lr,
            betas=self.config.betas,
            eps=self.config.eps,
            weight_decay=self.config.weight_decay,
            moments_dtype=resolve_dtype(self.config.moments_dtype),
        )

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
        self._check_trainable()
        assert self._optimizer is not None
        return self._optimizer

    def _check_trainable(self) -> None:
        self._built_model()
        if self.config.frozen:
            raise RuntimeError(
                "this train engine is frozen (TrainConfig.frozen): it takes no steps and has no "
                "optimizer to save or to load. For other weights, build a new engine with their "
                "folder as its model"
            )

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
        grad_norm = clip_gradients(model.parameters(), self.config.max_grad_norm)
        if not math.isfinite(grad_norm):
            optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"the gradient's norm is {grad_norm} at step {self._progress.num_steps}; no step "
                "was taken"
            )
        lr = self.config.lr * min(
            1.0, (self._progress.num_steps + 1) / max(1, self.config.num_warmup_steps)
        )
        for group in optimizer.param_groups:
            group["lr"] = lr
        with self._memory.optimizer_present(optimizer):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._progress = Progress(
            version=self._progress.version + 1, num_steps=self._progress.num_steps + 1
        )
        return {**stats, "grad_norm": grad_norm, "lr": lr}

    @torch.no_grad()
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
        model = self._built_model().eval()
        try:
            return self._accumulate(samples, loss_fn, loss_kwargs)
        finally:
            reshard(model)

    def _accumulate(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None,
    ) -> dict[str, float]:
        with failing_together("preparing the batch"):
            self._checkpointer.raise_failure()
            loss = prepare_loss(loss_fn, loss_kwargs, samples, self.config.head)
            checked = check_samples(samples, self._batching.vocab_size)
        micro_batches, num_tokens, num_samples = self._make_micro_batches(checked)
        if num_tokens == 0:
            raise ValueError("no token of the global batch counts: every loss_mask is empty")
        counts = {
            "num_tokens": num_tokens,
            **({"num_pairs": num_samples // 2} if loss.traits.paired else {}),
        }
        num_units = counts.get("num_pairs", num_tokens)
        sums: dict[str, torch.Tensor] = {}
        error: Exception | None = None
        for number, on_host in enumerate(micro_batches, start=1):
            begin_backward(
                self._built_model(),
                is_last=number == len(micro_batches),
                reshard_after_backward=self.config.reshard_after_backward,
            )
            micro_batch = on_host.to(self._device)
            outputs = self._outputs(micro_batch, loss)
            # The backward pass is a collective, so a rank without a loss here takes part too.
            total = outputs.sum() * 0.0
            if micro_batch.indices and error is None:
                try:
                    loss_sum, stats = loss(outputs, micro_batch.columns)
                # Raised below, after this rank has taken part in the remaining collectives.
                except Exception as exc:  # noqa: BLE001
                    error = exc
                else:
                    total = total + loss_sum
                    for name, value in {"loss": loss_sum, **stats}.items():
                        sums[name] = (
                            sums.get(name, torch.zeros((), device=self._device)) + value.detach()
                        )
            if torch.is_grad_enabled():
                with whole_pass(self._built_model()):
                    # FSDP averages gradients over its ranks, but the loss is a sum over all ranks
                    # divided by the global number of tokens (pairs).
                    (total * (self._built_mesh().data.size() / num_units)).backward()
        with failing_together("the loss"):
            if error is not None:
                raise error
        totals: dict[str, float] = {}
        own = {name: float(value) for name, value in sums.items()}
        for rank_sums in gather_objects(own)[:: self._layout().model_size]:
            for name, value in rank_sums.items():
                totals[name] = totals.get(name, 0.0) + value
        averages = {name: value / num_units for name, value in totals.items()}
        return {**averages, **{name: float(count) for name, count in counts.items()}}

    def _make_micro_batches(self, samples: Sequence[Columns]) -> tuple[list[MicroBatch], int, int]:
        """Split the samples into micro-batches, padded with empty ones to the largest rank's count.

        Returns the micro-batches and the global numbers of loss tokens and of samples. A
        collective.
        """
        groups = group_samples(samples, self._batching)
        num_tokens = sum(int(sample["loss_mask"].sum()) for sample in samples)
        shares = gather_objects((len(groups), num_tokens, len(samples), fingerprint(samples)))
        model_size = self._layout().model_size
        mismatched = [
            rank for rank, share in enumerate(shares) if share != shares[rank - rank % model_size]
        ]
        if mismatched:
            raise ValueError(
                f"rank(s) {mismatched} got other samples than the head of their model-parallel "
                "group; pass the same samples to all ranks of one data-parallel coordinate"
            )
        most = max(share[0] for share in shares)
        groups = group_samples(samples, self._batching, at_least=most)
        micro_batches = [make_micro_batch(group, samples, self._batching) for group in groups]
        micro_batches += [empty_micro_batch(self._batching)] * (most - len(groups))
        heads = shares[::model_size]
        return micro_batches, sum(share[1] for share in heads), sum(share[2] for share in heads)

    def _outputs(self, micro_batch: MicroBatch, loss: LossCall | None = None) -> torch.Tensor:
        """Compute log-probabilities or values of a micro-batch's tokens, (B, T) float32.

        The log-probability of a token is conditioned on the tokens before it; the first entry of
        each row is 0. If the loss needs entropies, they are added to the micro-batch's columns.
        """
        rows, mesh = micro_batch.rows, self._built_mesh()
        input_ids, position_ids, next_ids = (
            ids.chunk(mesh.layout.context_size, dim=1)[mesh.context_rank]
            for ids in (rows.input_ids, rows.position_ids, rows.next_ids)
        )
        arguments: dict[str, Any] = {}
        if self._uses_row_attention:
            arguments = {
                "position_ids": position_ids,
                "helmsman_rows": RowShape(rows.segments, mesh.context_group, self._device),
            }
        model = self._built_model()
        if self.config.head == "value":
            with whole_pass(model):
                values = model(input_ids=input_ids, use_cache=False, **arguments)
            return rows.per_token(self._whole_rows(values))
        group = None
        if self._has_sharded_logits:
            assert mesh.tensor is not None
            group = mesh.tensor.get_group()
        with whole_pass(model):
            statistics = model(
                input_ids=input_ids,
                use_cache=False,
                targets=next_ids,
                with_entropies=loss is not None and loss.needs_entropy,
                group=group,
                **arguments,
            )
        if statistics.entropies is not None:
            micro_batch.columns["entropy"] = rows.per_prediction(
                self._whole_rows(statistics.entropies)
            )
        return rows.per_prediction(self._whole_rows(statistics.logprobs))

    def _whole_rows(self, parts: torch.Tensor) -> torch.Tensor:
        group = self._built_mesh().context_group
        return parts if group is None else gather_tokens(parts, group)

    @torch.no_grad()
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
        model = self._built_model().eval()
        with failing_together("preparing the batch"):
            checked = check_samples(samples, self._batching.vocab_size)
        results = [torch.empty(0)] * len(samples)
        try:
            for micro_batch in self._make_micro_batches(checked)[0]:
                outputs = self._outputs(micro_batch.to(self._device)).cpu()
                for index, length, row in zip(
                    micro_batch.indices, micro_batch.lengths, outputs, strict=False
                ):
                    results[index] = row[:length].clone()
            self._built_model()  # outputs of aborted collectives would be arbitrary
        finally:
            reshard(model)
        return results

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
            self._in_files = self._in_files or CheckpointNames(model)
            return publish(
                named_tensors(model),
                target,
                form,
                version=self._progress.version,
                is_root=dist.get_rank() == 0,
                group=self._weight_group,
                gather=self._memory.gather,
                in_files=self._in_files,
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
        model, optimizer = self._built_model(), self._built_optimizer()
        with self._memory.optimizer_present(optimizer):
            self._checkpointer.save(
                os.fspath(path),
                model,
                optimizer,
                self._progress,
                self._model_folder(),
                background=background,
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
        self._check_trainable()
        optimizer = self._make_optimizer()
        self._progress = self._checkpointer.load(os.fspath(path), self._built_model(), optimizer)
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
        model, source = self._built_model(may_sleep=True), self._model_folder()
        export_hf(
            model,
            os.fspath(path),
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            source=source,
            gather=self._memory.gather,
        )

    def _model_folder(self) -> str | None:
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
        self._progress = Progress(version=version, num_steps=self._progress.num_steps)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate from the next step on; it is not part of a checkpoint.

        Raises:
            ValueError: The rate is negative or not finite.
        """
        self.config = msgspec.structs.replace(self.config, lr=lr)

    def destroy(self) -> None:
        """Free the model and leave the process group if this engine joined it. Idempotent."""
        if self._model is not None:
            self._checkpointer.close()
            self._weight_group.close()
            self._memory.clear()
            # initialize() may build another model, which starts from these counts.
            self._progress = Progress(version=0, num_steps=0)
        had_model, self._mesh, self._model, self._optimizer = (
            self._model is not None,
            None,
            None,
            None,
        )
        if had_model:
            current_platform.empty_cache()
        if self._owns_group:
            self._owns_group = False
            leave_process_group()

    @property
    def data_parallel_rank(self) -> int:
        """This rank's coordinate along the data-parallel axis."""
        return self._layout().data_rank

    @property
    def data_parallel_world_size(self) -> int:
        """Number of ranks along the data-parallel axis."""
        return self._layout().data_size

    @property
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        """Group of the tensor- and context-parallel ranks of one data-parallel coordinate.

        None when this rank is alone in it, and before initialize().
        """
        return None if self._mesh is None else self._mesh.model_group

    def _layout(self) -> Layout:
        is_there = dist.is_initialized()
        return Layout(
            rank=dist.get_rank() if is_there else environment_int("RANK", 0),
            world_size=dist.get_world_size() if is_there else environment_int("WORLD_SIZE", 1),
            tensor_size=self.config.tensor_parallel_size,
            context_size=self.config.context_parallel_size,
            num_replicas=self.config.data_parallel_replicas,
        )
