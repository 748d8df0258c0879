"""Mesh of a training job, and the process groups of its ranks.

Ranks are numbered with tensor parallelism innermost, then context parallelism, then data
parallelism, so that the ranks that communicate most are neighbours:

    rank = tensor_rank + tensor_parallel_size * (
        context_rank + context_parallel_size * data_parallel_rank
    )

Data-parallel and context-parallel ranks process different tokens. Together they form the replicas
and shards of FSDP: each replica has all parameters, sharded over its ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from helmsman.api.errors import ParallelLayoutError
from helmsman.engines._models.distributed import environment_int
from helmsman.engines._models.gloo_listeners import closed_afterwards
from helmsman.engines._models.model import decoder_layers
from helmsman.engines._train.parallel_plan import TensorPlan
from helmsman.engines.train_config import TrainConfig


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's coordinates; plain numbers, available before the process group exists.

    Raises ParallelLayoutError if the sizes do not divide the world size.
    """

    rank: int
    world_size: int
    tensor_size: int
    context_size: int
    num_replicas: int

    def __post_init__(self) -> None:
        sizes = {
            "tensor_parallel_size": self.tensor_size,
            "context_parallel_size": self.context_size,
            "data_parallel_replicas": self.num_replicas,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ParallelLayoutError(
                    what=name,
                    requested=size,
                    observed="expected a positive number of ranks",
                    step=f"Set {name} to 1 or more",
                )
        product = math.prod(sizes.values())
        if self.world_size % product:
            raise ParallelLayoutError(
                what=" x ".join(f"{name} {size}" for name, size in sizes.items()),
                requested=product,
                observed=f"it does not divide the world size, {self.world_size}",
                step=f"Start a multiple of {product} ranks, or choose sizes whose product divides "
                f"{self.world_size}",
            )

    @property
    def model_size(self) -> int:
        """Ranks that share one data-parallel coordinate, and therefore the samples."""
        return self.tensor_size * self.context_size

    @property
    def data_rank(self) -> int:
        return self.rank // self.model_size

    @property
    def data_size(self) -> int:
        return self.world_size // self.model_size

    @property
    def shard_size(self) -> int:
        """Ranks over which FSDP shards a copy of the parameters."""
        return self.world_size // self.tensor_size // self.num_replicas


def layout_of(config: TrainConfig) -> Layout:
    """Return this rank's coordinates: of its process group, or else by RANK and WORLD_SIZE."""
    is_there = dist.is_initialized()
    return Layout(
        rank=dist.get_rank() if is_there else environment_int("RANK", 0),
        world_size=dist.get_world_size() if is_there else environment_int("WORLD_SIZE", 1),
        tensor_size=config.tensor_parallel_size,
        context_size=config.context_parallel_size,
        num_replicas=config.data_parallel_replicas,
    )


class ParallelMesh:
    """The process groups of a layout. Created by all ranks together, after the default group.

    Their collectives wait ``timeout_s`` seconds for the slowest rank; torch would not apply the
    limit of the default group.
    """

    def __init__(self, layout: Layout, device_type: str, timeout_s: float) -> None:
        self.layout = layout
        sizes = {
            "replicate": layout.num_replicas,
            "shard": layout.shard_size,
            "tensor": layout.tensor_size,
        }
        # FSDP needs its axis even if it has one rank.
        axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        ranks = torch.arange(layout.world_size).view(tuple(axes.values()))
        lines = [_along(ranks, axis) for axis in range(ranks.ndim)]
        groups = [_group_of(rows, timeout_s) if len(rows) > 1 else _everybody() for rows in lines]
        mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))
        self.data: DeviceMesh = mesh["replicate", "shard"] if "replicate" in axes else mesh["shard"]
        """Mesh over which FSDP shards and replicates."""
        self.tensor: DeviceMesh | None = mesh["tensor"] if "tensor" in axes else None
        coordinates = torch.arange(layout.world_size).view(
            -1, layout.context_size, layout.tensor_size
        )
        self.model_group = (
            None if layout.model_size == 1 else _group_of(coordinates.flatten(1), timeout_s)
        )
        """Ranks with the same samples as this one; None if there are no others."""
        self.context_group = (
            None if layout.context_size == 1 else _group_of(_along(coordinates, 1), timeout_s)
        )
        """Ranks that share this rank's sequences; None if it has whole sequences."""

    @property
    def context_rank(self) -> int:
        """Index of this rank's part of the sequences."""
        return 0 if self.context_group is None else dist.get_rank(self.context_group)


def _along(ranks: torch.Tensor, axis: int) -> torch.Tensor:
    """Return rows of ranks that differ along one axis only."""
    return ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis])


def _everybody() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _group_of(rows: torch.Tensor, timeout_s: float) -> dist.ProcessGroup:
    group: dist.ProcessGroup
    with closed_afterwards():
        group, _ = dist.new_subgroups_by_enumeration(
            rows.tolist(), timeout=timedelta(seconds=timeout_s)
        )
    return group


def shard_model(
    model: nn.Module,
    mesh: ParallelMesh,
    plan: TensorPlan | None,
    policy: MixedPrecisionPolicy,
    *,
    reshard_after_forward: bool,
    offload_policy: OffloadPolicy,
    num_prefetched_layers: int,
) -> None:
    """Keep only this rank's part of each parameter: the plan's shard, sharded again by FSDP.

    This goes layer by layer, so that a device holds at most one whole layer besides the parameters
    outside of layers. With 0 prefetched layers, FSDP itself chooses when to gather.
    """
    names = {id(module): name for name, module in model.named_modules()}
    layers = decoder_layers(model)
    for layer in layers:
        if plan is not None and mesh.tensor is not None:
            plan.apply(layer, names[id(layer)], mesh.tensor)
        fully_shard(
            layer,
            mesh=mesh.data,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload_policy,
        )
    if plan is not None and mesh.tensor is not None:
        plan.apply(model, "", mesh.tensor, but_for=layers)
    fully_shard(model, mesh=mesh.data, mp_policy=policy, offload_policy=offload_policy)
    if num_prefetched_layers:
        _prefetch(layers, num_prefetched_layers)
    if hasattr(model, "set_reduce_scatter_unused_params"):
        # Replicas add up micro-batches by position in a layer's gradients: none may be missing.
        model.set_reduce_scatter_unused_params(mesh.layout.num_replicas > 1)  # type: ignore[operator]


def _prefetch(layers: Sequence[nn.Module], num: int) -> None:
    """Make each layer start the all-gathers of the next ``num`` ones, in either direction."""
    for index, layer in enumerate(layers):
        assert isinstance(layer, FSDPModule)
        following: list[FSDPModule] = layers[index + 1 : index + 1 + num]  # type: ignore[assignment]
        preceding: list[FSDPModule] = layers[max(0, index - num) : index][::-1]  # type: ignore[assignment]
        layer.set_modules_to_forward_prefetch(following)
        layer.set_modules_to_backward_prefetch(preceding)


def begin_backward(model: nn.Module, *, is_last: bool, reshard_after_backward: bool) -> None:
    """Choose the communication of one micro-batch's backward pass; the last one completes the sum.

    Replicas sum their gradients once, in the last one, instead of once per micro-batch. The last
    one also frees gathered parameters, which would not see the optimizer's step. The model of a
    single rank is not sharded, and has none.
    """
    if not isinstance(model, FSDPModule):
        return
    # torch before 2.13 would lose the sums of parameters that the last one does not use.
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_requires_all_reduce(is_last)
    model.set_reshard_after_backward(is_last or reshard_after_backward)


@contextlib.contextmanager
def whole_pass(model: nn.Module) -> Iterator[None]:
    """Guard a forward or backward pass of a model: after an error, reset FSDP's state.

    Otherwise FSDP would treat the next backward pass as part of the failed one, and skip the
    gradients that it reduces at the end: those of the embeddings.
    """
    try:
        yield
    except BaseException:
        if isinstance(model, FSDPModule):
            # FSDP would add gradients of still gathered parameters to the next ones.
            model.zero_grad(set_to_none=True)
        if hasattr(model, "reset_iter_state"):
            # Since torch 2.13; with an older one, the engine must be rebuilt after the error.
            model.reset_iter_state()  # type: ignore[operator]
        raise


@contextlib.contextmanager
def cast_parameters(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute in ``dtype`` during the block, as FSDP does; for a model that FSDP does not shard.

    Modules hold casts of their floating-point parameters meanwhile. Gradients reach the parameters
    themselves through these casts, in the parameters' type, as often as the block goes backward.
    """
    if isinstance(model, FSDPModule):
        yield
        return
    places = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype
    ]
    casts: dict[nn.Parameter, Any] = {}
    try:
        for parameters, name, parameter in places:
            if parameter not in casts:  # tied ones are cast once
                casts[parameter] = parameter.to(dtype)
            parameters[name] = casts[parameter]
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


def reshard(model: nn.Module) -> None:
    """Free the parameters that a pass without a backward pass has left gathered.

    Gathered parameters would not see loaded values or optimizer steps.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], limit: float | None) -> float:
    """Scale gradients so that their global 2-norm is at most ``limit`` (None: any). A collective.

    Returns the norm before clipping. If it is not finite, nothing is scaled. torch's
    clip_grad_norm_ does not support gradients on different meshes, such as those of tensor-parallel
    and other layers.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    total = torch.zeros((), dtype=torch.float64)
    if shards:
        norms = torch.stack(torch._foreach_norm(shards)).cpu().double()
        weights = torch.tensor([1.0 / _num_copies(grad) for grad in grads], dtype=torch.float64)
        total = (norms.square() * weights).sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    norm = math.sqrt(total) if total >= 0 else math.nan
    # The same formula as in torch's clip_grad_norm_, which multiplies by 1, too.
    if shards and limit is not None and math.isfinite(norm) and limit < norm + 1e-6:
        torch._foreach_mul_(shards, limit / (norm + 1e-6))
    return norm


def _num_copies(grad: torch.Tensor) -> float:
    """Return the number of ranks that hold each entry of a gradient."""
    num_parts = 1
    if isinstance(grad, DTensor):
        for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
            if placement.is_partial():
                raise AssertionError(f"a gradient is not reduced: {grad.placements}")
            num_parts *= 1 if placement.is_replicate() else size
    return dist.get_world_size() / num_parts
