"""Right and wrong uses of worker groups, for tests/nightly/api/test_typing.py, which runs mypy.

A line that ends in ``# error: CODE`` must be refused with that code, every other line must pass.
"""

from __future__ import annotations

from typing import assert_type

import torch

from helmsman.api.batch import Batch
from helmsman.api.dispatch import AxisSharding, Collect, Dispatch, Execute
from helmsman.api.register import register
from helmsman.api.remote_batch import RemoteBatch
from helmsman.api.worker_group import ClusterConfig, GroupFuture, GroupWorker
from helmsman.controller._groups.cluster import Cluster
from helmsman.controller._groups.resource_manager import ResourceManager


def total(parts: list[float]) -> int:
    return round(sum(parts))


class Actor(GroupWorker):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    @register(Dispatch.DP_MP_COMPUTE, shard=("batch",))
    def log_probs(self, batch: Batch, temperature: float = 1.0) -> Batch:
        return batch

    @register(Dispatch.DP_MP_COMPUTE)
    def rewards(self, batch: Batch) -> torch.Tensor:
        return torch.zeros(len(batch))

    @register(Dispatch.DP_MP_COMPUTE, collect=Collect.LIST)
    def train_step(self, batch: Batch) -> dict[str, float]:
        return {"lr": self.lr}

    @register(Dispatch.ONE_TO_ALL)
    def set_lr(self, lr: float) -> float:
        return lr

    @register(Dispatch.ONE_TO_ALL_ONE)
    async def version(self) -> int:
        return 0

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def save(self, path: str) -> str:
        return path

    @register(AxisSharding(("dp", "cp"), ("tp",)))
    def chunked(self, batch: Batch) -> Batch:
        return batch

    @register(Dispatch.DP_MP_COMPUTE)
    def last_stage(self, batch: Batch) -> Batch | None:
        return batch

    @register(Dispatch.DP_MP_COMPUTE)
    def store(self, batch: Batch) -> None:
        return None

    @register(Dispatch.DP_MP_COMPUTE, collect=total)
    def loss(self, batch: Batch) -> float:
        return 0.0

    @register(Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL)
    def all_of(self, batch: Batch) -> int:
        return len(batch)

    @register(Dispatch.ALL_TO_ALL)
    def each(self, number: int) -> int:
        return self.helper(number)

    def helper(self, number: int) -> int:
        assert_type(self.set_lr(1.0), float)  # of a worker itself it is an ordinary method
        return number


class Critic:
    @register(Dispatch.ONE_TO_ALL)
    def values(self) -> int:
        return 0


class SmallActor(Actor):
    pass


class ActorCluster(Cluster[Actor]):
    log_probs = Actor.log_probs
    train_step = Actor.train_step
    set_lr = Actor.set_lr
    values = Critic.values


def right(actor: ActorCluster, small: Cluster[SmallActor], batch: Batch) -> None:
    assert_type(actor.log_probs(batch), Batch)
    assert_type(actor.log_probs(batch, temperature=0.5), Batch)
    assert_type(actor.log_probs.submit(batch), GroupFuture[Batch])
    assert_type(actor.log_probs.options(timeout=3.0)(batch), Batch)
    assert_type(actor.train_step(batch), list[dict[str, float]])
    assert_type(actor.set_lr(0.1), list[float])
    assert_type(actor.method(Actor.rewards)(batch), torch.Tensor)
    assert_type(actor.method(Actor.version)(), int)
    assert_type(actor.method(Actor.save)("path"), str)
    assert_type(actor.method(Actor.chunked)(batch), Batch)
    assert_type(actor.method(Actor.all_of)(batch), list[int])
    assert_type(actor.method(Actor.last_stage)(batch), Batch)
    assert_type(actor.method(Actor.loss)(batch), int)
    actor.method(Actor.store)(batch)
    assert_type(actor.method(Actor.each)([1, 2]), list[int])
    assert_type(small.method(Actor.set_lr)(0.1), list[float])
    assert_type(actor.log_probs.keep(batch), RemoteBatch)
    assert_type(actor.log_probs(actor.log_probs.keep(batch)), Batch)
    assert_type(actor.log_probs.options(keep=True).submit(batch), GroupFuture[RemoteBatch])
    assert_type(actor.set_lr.submit(0.1).result(), list[float])


async def awaited(actor: ActorCluster, batch: Batch) -> None:
    assert_type(await actor.log_probs.submit(batch), Batch)


def wrong_results(actor: ActorCluster, batch: Batch) -> None:
    rows: list[Batch] = actor.log_probs(batch)  # error: assignment
    rate: float = actor.set_lr(0.1)  # error: assignment
    kept: RemoteBatch = actor.set_lr.submit(0.1).result()  # error: assignment
    print(rows, rate, kept)


def wrong(actor: ActorCluster, resources: ResourceManager, batch: Batch) -> None:
    actor.log_probs([1, 2, 3])  # error: arg-type
    actor.log_probs()  # error: call-arg
    actor.log_probs(batch, heat=0.5)  # error: call-arg
    actor.set_lr("fast")  # error: arg-type
    actor.method(Actor.loss)([1.0])  # error: arg-type
    actor.no_such_method()  # error: attr-defined
    actor.rewards(batch)  # error: attr-defined
    actor.method(Actor.helper)  # error: arg-type
    actor.method(Critic.values)  # error: arg-type
    actor.values()  # error: arg-type
    batch.columns["x"] = torch.zeros(1)  # error: index
    ClusterConfig(device_mapping=3.5)  # error: arg-type
    Cluster("actor", Actor, resources)  # error: call-arg


@register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)  # error: call-overload
def rank_zero_of_different_things(self: Actor, number: int) -> int:
    return number


@register(Dispatch.DP_MP_COMPUTE, Execute.RANK_ZERO)  # error: call-overload
def rank_zero_of_a_share(self: Actor, batch: Batch) -> Batch:
    return batch


@register(Dispatch.ONE_TO_ALL, shard=("lr",))  # error: call-overload
def cut_where_nothing_is_cut(self: Actor, lr: float) -> float:
    return lr


@register(Dispatch.DP_MP_COMPUTE)  # error: arg-type
def metrics_cannot_be_joined(self: Actor, batch: Batch) -> dict[str, float]:
    return {}


@register(Dispatch.DP_MP_COMPUTE, remainder="drop")  # error: call-overload
def no_such_remainder(self: Actor, batch: Batch) -> Batch:
    return batch
