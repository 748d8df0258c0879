"""What the tests of engines share: processes of ranks, which end with the last of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helmsman.engines.train import FSDPTrainEngine
from tests.engines.ranks import end_ranks
from tests.engines.small_models import QWEN2

Make = Callable[..., FSDPTrainEngine]


@pytest.fixture(scope="package", autouse=True)
def ranks_end() -> Iterator[None]:
    """Nothing is started before a test asks for it."""
    yield
    end_ranks()


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing by more, and on busy cores threads that wait for each other
    take several times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package", autouse=True)
def on_the_host() -> Iterator[None]:
    """A job of one rank, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        patch.setenv("HELMSMAN_PLATFORM", "cpu")
        yield


@pytest.fixture
def make(on_the_host: None) -> Iterator[Make]:
    """Builds train engines of one rank in this process, which end with the test."""
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
