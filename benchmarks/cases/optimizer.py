"""A train engine's AdamW beside torch's default one, on parameters sharded by FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness import Pair, case
from benchmarks.world import World

NUM_PARAMETERS = 340
"""Parameters of a model with 28 layers of 12, and 4 others."""
SHAPE = (256, 64)


@case(
    "optimizer.step",
    unit="ms",
    goal="<= 0.2",
    floor="torch.optim.AdamW with its default settings",
)
def step(world: World) -> Pair:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from helmsman.engines._train.optimizer import FusedAdamW

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world.until_case_ends.callback(dist.destroy_process_group)
    mesh = init_device_mesh("cpu", (1,))

    def stepped(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[], Any]:
        parameters = []
        for _ in range(NUM_PARAMETERS):
            parameter = torch.nn.Parameter(distribute_tensor(torch.randn(SHAPE), mesh, [Shard(0)]))
            parameter.grad = distribute_tensor(torch.randn(SHAPE), mesh, [Shard(0)])
            parameters.append(parameter)
        return make(parameters, lr=1e-3, **options).step

    return Pair(
        ours=stepped(FusedAdamW, moments_dtype=torch.float32),
        floor=stepped(torch.optim.AdamW),
    )
