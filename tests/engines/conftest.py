"""Fixtures of the engines' tests: one thread, one rank on the CPU, and built train engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helmsman.engines.train import FSDPTrainEngine
from tests.engines.small_models import QWEN2

Make = Callable[..., FSDPTrainEngine]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread: small models gain nothing by more, and on busy cores threads that wait
    for each other take several times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package", autouse=True)
def on_the_host() -> Iterator[None]:
    """Set the environment of a job of one rank on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        patch.setenv("HELMSMAN_PLATFORM", "cpu")
        yield


@pytest.fixture
def make(on_the_host: None) -> Iterator[Make]:
    """Build train engines of one rank in this process, which are destroyed after the test."""
    made: list[FSDPTrainEngine] = []

    def build(**fields: Any) -> FSDPTrainEngine:
        engine = FSDPTrainEngine(**{"model": QWEN2, "lr": 1e-2, **fields})
        made.append(engine)
        engine.create_process_group()
        engine.initialize()
        return engine

    yield build
    for engine in made:
        engine.destroy()
    assert not dist.is_initialized()
