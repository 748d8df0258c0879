"""Broadcast of arguments in a model-parallel group: all ranks receive the head's, or none runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from tests.contract.engines import OneWay, Ranked, Unloadable
from tests.contract.helpers import LIMIT_S, Engine
from tests.contract.marks import needs_processes

pytestmark = needs_processes


@pytest.fixture(scope="module")
def ranks(scheduler: Scheduler) -> Iterator[list[Engine]]:
    """Provide two gloo ranks of one model-parallel group."""
    name = "ranked"
    workers = scheduler.create_workers(
        Job(role=name, replicas=2, tasks=[SchedulingSpec(port_count=1)])
    )
    port = scheduler.get_workers(name)[0].engine_ports[0]
    engines = [Engine.create(scheduler, worker, Ranked) for worker in workers]
    joining = [
        engine.begin("join", rank, 2, port, timeout=60) for rank, engine in enumerate(engines)
    ]
    for each in joining:
        each.result(timeout=60)
    yield engines
    scheduler.delete_workers(name)


def _both(
    ranks: list[Engine], method: str, arguments: list[tuple[Any, ...]], **meta: Any
) -> list[Any]:
    futures: list[Future[Any]] = [
        engine.begin(method, *given, rpc_meta=meta or None)
        for engine, given in zip(ranks, arguments, strict=True)
    ]
    outcomes: list[Any] = []
    for future in futures:
        try:
            outcomes.append(future.result(timeout=LIMIT_S))
        except errors.HelmsmanError as error:
            outcomes.append(error)
    return outcomes


def test_broadcast_head_arguments_reach_all(ranks: list[Engine]) -> None:
    outcomes = _both(ranks, "receive", [("from the head", [1, 2]), ("ignored",)])
    assert outcomes == [(("from the head", [1, 2]), {})] * 2


def test_broadcast_unusable_argument_runs_nowhere(ranks: list[Engine]) -> None:
    before = _both(ranks, "count", [(), ()], broadcast=False)
    for argument, reason in ((Unloadable(), "refused to load"), (OneWay(), "lock")):
        head, other = _both(ranks, "receive", [(argument,), ()])
        assert reason in str(head)
        assert isinstance(head, errors.ArgumentNotLoadableError) == (reason != "lock")
        assert isinstance(other, errors.PeerNotReadyError)
        assert other.ranks == [0]  # type: ignore[attr-defined]
        assert reason in str(other)
    assert _both(ranks, "count", [(), ()], broadcast=False) == before
    assert _both(ranks, "receive", [("still usable",), ()]) == [(("still usable",), {})] * 2


def test_broadcast_carries_lambdas_and_tensors(ranks: list[Engine]) -> None:
    import torch

    assert _both(ranks, "apply", [(lambda rank: rank + 1,), ()]) == [1, 2]
    given = torch.arange(5000, dtype=torch.bfloat16)
    for (received,), _ in _both(ranks, "receive", [(given,), ()]):
        assert torch.equal(received, given)
        assert received.dtype == given.dtype


def test_broadcast_off(ranks: list[Engine]) -> None:
    assert _both(ranks, "receive", [(0,), (1,)], broadcast=False) == [((0,), {}), ((1,), {})]
    alone = ranks[1].call("receive", "alone", rpc_meta={"broadcast": False})
    assert alone == (("alone",), {}), "no rank waits for another"
