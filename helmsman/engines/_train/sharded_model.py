"""Construction of a training job's model, sharded over the ranks of a mesh."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from helmsman.engines._models.distributed import failing_together
from helmsman.engines._models.model import build_model, checkpoint_layers, resolve_dtype
from helmsman.engines._train.adapters import Adapters
from helmsman.engines._train.attention import (
    check_heads,
    compile_layers,
    use_row_attention,
    why_not_rows,
)
from helmsman.engines._train.batching import Batching
from helmsman.engines._train.offload import offload_policy, place
from helmsman.engines._train.output_layer import return_statistics
from helmsman.engines._train.parallel import ParallelMesh, shard_model
from helmsman.engines._train.parallel_plan import TensorPlan
from helmsman.engines._weights.deferred import DeferredModel, defer_model, fill
from helmsman.engines._weights.model_folder import check_model_folder
from helmsman.engines.train_config import TrainConfig


class ModelTraits(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of the rows that a sharded model takes and of the logits that it returns."""

    batching: Batching
    compute_dtype: torch.dtype
    uses_row_attention: bool
    """Whether attention takes the layout of packed or context-parallel rows (RowShape)."""
    has_sharded_logits: bool
    """Whether each tensor-parallel rank computes the logits of a part of the vocabulary."""


def build_sharded_model(
    config: TrainConfig, mesh: ParallelMesh, device: torch.device
) -> tuple[nn.Module, ModelTraits, Adapters | None]:
    """Build the model of a configuration, and keep this rank's shards on its device. A collective.

    Raises:
        ValueError: The model cannot be built, or cannot be divided as configured.
        RuntimeError: Another rank failed.
    """
    with failing_together("building the model"):
        compute_dtype = resolve_dtype(config.compute_dtype)
        is_frozen = config.frozen or config.lora is not None
        model, deferred = _build(config, compute_dtype if is_frozen else torch.float32)
        model.requires_grad_(not is_frozen)
        adapters = None if config.lora is None else Adapters(model, config.lora, config.seed)
        plan, traits = _prepare(model, config, compute_dtype)
    # A single rank has nothing to gather or to sum; FSDP would copy every parameter and gradient.
    if dist.get_world_size() > 1 or config.offload == "all":
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=resolve_dtype(config.reduce_dtype)
        )
        shard_model(
            model,
            mesh,
            plan,
            policy,
            reshard_after_forward=config.reshard_after_forward,
            offload_policy=offload_policy(config.offload),
            num_prefetched_layers=config.num_prefetched_layers,
        )
    if deferred is not None:
        with failing_together("reading the model's weights"):
            deferred.read(torch.device("cpu") if config.offload == "all" else device)
    if adapters is not None:
        fill(model, adapters.take_values())
    return place(model, device, config.offload), traits, adapters


def _build(config: TrainConfig, dtype: torch.dtype) -> tuple[nn.Module, DeferredModel | None]:
    """Build the model, without its weights if they can be read after it has been sharded."""
    given, seed, head = config.model, config.seed, config.head
    deferred = None
    if isinstance(given, str):
        check_model_folder(
            given, head=head, init=config.init, reads_checkpoints=True, needs_transformers=True
        )
        deferred = defer_model(given, seed=seed, dtype=dtype, head=head)
    if deferred is not None:
        return deferred.model, deferred
    return build_model(given, seed=seed, dtype=dtype, head=head), None


def _prepare(
    model: nn.Module, config: TrainConfig, compute_dtype: torch.dtype
) -> tuple[TensorPlan | None, ModelTraits]:
    """Validate the parallel layout against the model, and modify the model before sharding."""
    of_model: Any = model.config
    tensor_size, context_size = config.tensor_parallel_size, config.context_parallel_size
    plan = TensorPlan(model, tensor_size) if tensor_size > 1 else None
    packing = not why_not_rows(model) if config.packing is None else config.packing
    if context_size > 1:
        use_row_attention(model, f"context_parallel_size {context_size}")
        check_heads(of_model.get_text_config(), tensor_size, context_size)
    elif packing:
        use_row_attention(model, "packing")
    if config.compile_layers:
        compile_layers(model)  # checkpoints, and later FSDP, work on the compiled layers
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    if config.head == "lm":
        return_statistics(model)
    batching = Batching(
        max_tokens=config.max_tokens_per_micro_batch,
        vocab_size=int(of_model.get_text_config().vocab_size),
        packing=packing,
        multiple=context_size,
    )
    return plan, ModelTraits(
        batching=batching,
        compute_dtype=compute_dtype,
        uses_row_attention=packing or context_size > 1,
        has_sharded_logits=plan is not None and plan.has_sharded_logits,
    )
