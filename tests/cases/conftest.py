"""Schedulers, a small model and a tokenizer, shared by the cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman import Scheduler, make_scheduler
from helmsman.recipes import make_model
from tests.cases.inputs import tokenizer_folder

OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"preload": ()},
    "ray": {"preload": (), "address": "local", "num_cpus": 16},
}


@pytest.fixture(scope="package", params=list(OPTIONS))
def backend(request: pytest.FixtureRequest) -> str:
    """Name of the scheduler."""
    return str(request.param)


@pytest.fixture(scope="package")
def scheduler(backend: str) -> Iterator[Scheduler]:
    """Provide a scheduler that all tests share."""
    with make_scheduler(backend, **OPTIONS[backend]) as made:
        yield made


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch use one thread, as small models need."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small model."""
    return str(make_model(tmp_path_factory.mktemp("given") / "model", num_layers=1, width=32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer."""
    return tokenizer_folder(tmp_path_factory.mktemp("case"))
